"""Workers that send and receive weights, for `test_ray_carrier.py`."""

from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_weights.transfer import receive, send


class Holder:
    """Sends and receives tensors, and holds what came first."""

    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank.rank

    def send_weights(self, spec: TransferSpec, megabytes: int) -> None:
        import torch

        send(spec, [(f"t{n}", torch.full((262_144 + n,), spec.version + n / 7)) for n in range(megabytes)])

    def receive_weights(self, spec: TransferSpec) -> list[tuple[str, int, float]]:
        return [(name, tensor.numel(), float(tensor.double().sum())) for name, tensor in receive(spec, self.rank)]

    async def begin(self, spec: TransferSpec) -> int:
        """Read one tensor and stop."""
        import os

        next(receive(spec, self.rank))
        return os.getpid()
