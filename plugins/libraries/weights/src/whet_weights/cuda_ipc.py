"""Weight sync between processes on one GPU: the sender's buffer is mapped into the receivers (CUDA IPC).

Every sender sends all weights, and a receiver reads the sender on its own GPU. Two buffers alternate, so that one is
filled while the other is read; a receiver confirms when it has read one. Not tested on a GPU yet.
"""

import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet_weights import bucket_stream
from whet_weights.bucket_stream import Broken, tell, told
from whet_weights.manifest import title
from whet_weights.meeting import Offer
from whet_weights.staged_copy import StreamReceiver

if TYPE_CHECKING:
    import torch


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Send the tensors, cast to `spec.dtype`, to the receivers on this process's GPU."""
    alone = attrs.evolve(spec, kept=spec.kept and sender == 0)  # one copy is enough
    bucket_stream.send(alone, weights, sender, _Sending(spec), _gpu())


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor, as a view of the sender's memory. Raises `WeightSyncError`."""
    yield from bucket_stream.receive(spec, receiver, _Receiving())


class _Sending:
    def __init__(self, spec: TransferSpec) -> None:
        self._spec, self._deadline = spec, time.monotonic() + spec.timeout_seconds
        self._receivers: list[socket.socket] = []
        self._device: torch.device
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._unread = [False, False]
        self._turn = 0

    def meet(self, receivers: Sequence[StreamReceiver], device: "torch.device") -> None:
        """Check that the tensors are on a GPU. Nothing has to be prepared."""
        if device.type != "cuda":
            raise WeightSyncError(f"{title(self._spec)}: cuda-ipc sends what is on a GPU, found tensors on {device}")
        self._receivers, self._device = [receiver.connection for receiver in receivers], device

    def room(self, size: int) -> "torch.Tensor":
        """Return the buffer whose turn it is, after all receivers have read it."""
        import torch

        self._turn = 1 - self._turn
        self._await(self._turn)
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return buffer[:size]

    def give(self, head: dict[str, Any], size: int) -> None:
        """Send a bucket's place in memory."""
        import torch

        torch.cuda.current_stream(self._device).synchronize()
        buffer = self._buffers[self._turn]
        assert buffer is not None
        for connection in self._receivers:  # each releases what it was given
            tell(connection, {**head, "memory": _shared(buffer)})
        self._unread[self._turn] = True

    def finish(self) -> None:
        """Wait until every receiver has read both buffers."""
        for turn in (1 - self._turn, self._turn):
            self._await(turn)

    def _await(self, turn: int) -> None:
        if self._unread[turn]:
            for connection in self._receivers:
                told(connection, self._deadline)
            self._unread[turn] = False


class _Receiving:
    def choose(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return the sender on this GPU. Raises `Broken` if there is none."""
        here = _gpu()
        found = [offer for offer in senders if here and offer["place"] == here]
        if not found:
            raise Broken("no sender is on the GPU of this process")
        return found[:1]

    def copies(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return the first sender: only this one keeps a copy."""
        return senders[:1]

    def hello(self, sender: int) -> dict[str, Any]:
        """Return an empty message: the sender needs to know nothing."""
        return {}

    def meet(self, connection: socket.socket, sender: int, meeting: dict[str, Any]) -> None:
        """Do nothing: there is no group to join."""

    def take(self, connection: socket.socket, sender: int, head: dict[str, Any]) -> "torch.Tensor":
        """Return a bucket, mapped into this process."""
        return _mapped(head["memory"])[: head["bytes"]]

    def done(self, connection: socket.socket) -> None:
        """Confirm that a bucket has been read."""
        import torch

        torch.cuda.current_stream().synchronize()
        tell(connection, {"read": True})


def _gpu() -> str:
    """Return an identifier of this process's current GPU, equal in all processes. Empty: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _shared(buffer: "torch.Tensor") -> dict[str, Any]:
    """Return what another process needs to map a buffer. The buffer is kept until that process releases it."""
    names = ("handle", "size", "offset", "counter", "counter_offset", "event", "sync")
    _, *found = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in zip(names, found, strict=True)}


def _mapped(memory: dict[str, Any]) -> "torch.Tensor":
    import torch

    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        bytes.fromhex(memory["handle"]),
        memory["size"],
        memory["offset"],
        bytes.fromhex(memory["counter"]),
        memory["counter_offset"],
        bytes.fromhex(memory["event"]),
        memory["sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
