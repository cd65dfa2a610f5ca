"""The collectives that the ranks of a backend need besides FSDP2's own, and a stopwatch for phases."""

from collections.abc import Sequence

import torch

from whet.data import metrics
from whet.data.metrics import Metric
from whet.errors import ConfigError, WhetError
from whet.interfaces.workers import WorkerRank
from whet_weights.ports import shortage


class Ranks:
    """The ranks of the backend. Joins the process group if there is more than one rank."""

    def __init__(self, rank: WorkerRank) -> None:
        self.rank, self.size, self.role = rank.rank, rank.size, rank.role
        self.device = torch.device(rank.device)
        self._joined = False
        if self.size > 1:
            import torch.distributed as dist

            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                self._join(rank)
                self._joined = True
            elif dist.get_world_size() != self.size:
                others = f"the other role in these processes has {dist.get_world_size()} ranks"
                raise ConfigError(f"cluster.ranks.{rank.role}: is {self.size}, but {others}; roles that train or are "
                                  "scored in shared processes have equally many")  # fmt: skip

    def _join(self, rank: WorkerRank) -> None:
        import torch.distributed as dist

        kind = "nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(kind, init_method=rank.rendezvous, rank=self.rank, world_size=self.size)
        except RuntimeError as error:
            raise WhetError(
                f"it cannot meet the other ranks at {rank.rendezvous} ({kind}): {error}{shortage()}"
            ) from error

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks, in float64."""
        return self._reduce(numbers, "SUM")

    def max(self, number: int) -> int:
        """Return the largest number over all ranks."""
        return int(self._reduce([float(number)], "MAX")[0])

    def _reduce(self, numbers: Sequence[float], operation: str) -> list[float]:
        if self.size == 1:
            return [float(number) for number in numbers]
        import torch.distributed as dist

        vector = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device=self.device)
        dist.all_reduce(vector, getattr(dist.ReduceOp, operation))
        result: list[float] = vector.tolist()
        return result

    def leave(self) -> None:
        """Leave the process group, if this object joined it."""
        if self._joined:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._joined = False


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its queued work."""
    import time

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Watch:
    """Adds up the seconds of each phase."""

    def __init__(self, device: torch.device, role: str) -> None:
        """Start the stopwatch. `role` is part of the metric names, e.g. `seconds/critic.forward`."""
        self._device, self._role = device, role
        self._last = clock(device)
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = clock(self._device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, Metric]:
        """Return the seconds of each phase as metrics."""
        return {f"seconds/{self._role}.{phase}": metrics.total(seconds) for phase, seconds in self._seconds.items()}
