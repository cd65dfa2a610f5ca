"""Weight sync by broadcasts: NCCL between GPUs, gloo between CPUs. For roles that have devices of their own.

Each sender has a process group with the receivers that are present. The sender keeps the group while the receivers stay
the same. A restarted receiver is in the next group. Nobody joins a group until all are ready, because joining cannot be
interrupted: a receiver that dies before costs nobody time. Receivers read several senders one after another, in order.
Therefore senders that gather tensors together must do so in this order too: all for the first sender, then all for the
second. NCCL has not been tested, because no GPUs were available.
"""

import ctypes
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.interfaces.weights import TransferSpec
from whet_weights import bucket_stream
from whet_weights.bucket_stream import Broken, is_gone, tell, told
from whet_weights.meeting import Offer
from whet_weights.ports import listen
from whet_weights.staged_copy import StreamReceiver, own_address

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.0005


def send(spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Cast the tensors to `spec.dtype`, and broadcast them from the device of the first tensor."""
    bucket_stream.send(spec, weights, sender, _Sending(spec, sender))


def receive(spec: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor. A tensor that arrives by NCCL is on this process's current GPU. Raises `WeightSyncError`."""
    yield from bucket_stream.receive(spec, receiver, _Receiving(spec, receiver))


@frozen
class _Group:
    """A process group that is not registered with torch's own functions. Its rank 0 sends."""

    name: str
    size: int
    device: "torch.device"
    group: Any
    store: Any
    """The store of the group. It must live as long as the group."""

    def broadcast(self, data: "torch.Tensor", others: Sequence[socket.socket], deadline: float) -> None:
        """Take part in a broadcast. Raises `Broken` if a process at the other end of a connection is gone."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self.group.broadcast([data], options)
        try:
            while not work.is_completed():
                if any(map(is_gone, others)):
                    raise Broken("who takes part in the broadcast is gone")
                if time.monotonic() > deadline:
                    raise Broken("a broadcast did not end in time")
                time.sleep(_POLL_SECONDS)
            work.wait()  # raises the error of a failed broadcast
        except BaseException:
            self.abort()
            if not work.is_completed():  # gloo cannot end it, and freeing the group would wait for it
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            raise

    def abort(self) -> None:
        """Abort the running broadcast, also in the other processes, if the library supports this."""
        with suppress(RuntimeError, AttributeError):
            self.group.abort()


_groups: dict[tuple[str, str, int, int], _Group] = {}
"""Groups of this process, by ("send" or "receive", address of the exchange, sender, receiver or -1 for the sender)."""
_lock = threading.Lock()


class _Sending:
    def __init__(self, spec: TransferSpec, sender: int) -> None:
        self._spec, self._key = spec, ("send", spec.address, sender, -1)
        self._deadline = time.monotonic() + spec.timeout_seconds
        self._receivers: list[socket.socket] = []
        self._buffer: torch.Tensor | None = None
        self._device: torch.device

    def meet(self, receivers: Sequence[StreamReceiver], device: "torch.device") -> None:
        """Use the group that all receivers are already in, or make a new one."""
        self._receivers, self._device = [receiver.connection for receiver in receivers], device
        group = _groups.get(self._key)
        held = {receiver.said["held"] for receiver in receivers}
        if group is None or held != {group.name} or (group.size, group.device) != (len(receivers) + 1, device):
            self._gather()

    def room(self, size: int) -> "torch.Tensor":
        """Return a buffer that is kept for this transfer."""
        import torch

        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffer[:size]

    def give(self, head: dict[str, Any], size: int) -> None:
        """Announce a bucket and broadcast it."""
        assert self._buffer is not None
        for connection in self._receivers:
            tell(connection, head)
        try:
            _groups[self._key].broadcast(self._buffer[:size], self._receivers, self._deadline)
        except BaseException:
            _forget(self._key)
            raise

    def finish(self) -> None:
        """Do nothing: all receivers have read the buffer when a broadcast has finished."""

    def _gather(self) -> None:
        """Make a group with all receivers."""
        import torch.distributed as dist

        _forget(self._key)
        host, seconds = own_address(self._spec), self._spec.timeout_seconds
        listener = listen(host, "weight syncs")  # torch would listen on every interface
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, timeout=timedelta(seconds=seconds), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        name, size = uuid.uuid4().hex, len(self._receivers) + 1
        kind = "nccl" if self._device.type == "cuda" else "gloo"
        for rank, connection in enumerate(self._receivers, start=1):
            meeting = {"name": name, "host": host, "port": port, "rank": rank, "size": size, "kind": kind}
            tell(connection, {"meet": meeting})
        for connection in self._receivers:
            try:
                told(connection, self._deadline)
            except Broken as error:
                raise Broken(f"a process is gone that was to take part in the broadcast: {error}") from error
        for connection in self._receivers:
            tell(connection, {"join": name})
        made = _join(store, 0, size, self._device, host, seconds)
        with _lock:
            _groups[self._key] = _Group(name, size, self._device, made, store)


class _Receiving:
    def __init__(self, spec: TransferSpec, receiver: int) -> None:
        self._spec, self._receiver = spec, receiver
        self._deadline = time.monotonic() + spec.timeout_seconds
        self._buffer: torch.Tensor | None = None

    def choose(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return all senders: this receiver reads each of them."""
        return senders

    def copies(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return all senders: each has a copy of what it sent."""
        return senders

    def hello(self, sender: int) -> dict[str, Any]:
        """Return the name of this receiver's group with that sender."""
        group = _groups.get(self._key(sender))
        return {"held": "" if group is None else group.name}

    def take(self, connection: socket.socket, sender: int, head: dict[str, Any]) -> "torch.Tensor":
        """Receive a bucket by broadcast and return its bytes."""
        import torch

        group, size = _groups[self._key(sender)], head["bytes"]
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != group.device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=group.device)
        try:
            group.broadcast(self._buffer[:size], [connection], self._deadline)
        except BaseException:
            _forget(self._key(sender))
            raise
        return self._buffer[:size]

    def meet(self, connection: socket.socket, sender: int, meeting: dict[str, Any]) -> None:
        """Join the group in the sender's meeting message."""
        import torch
        import torch.distributed as dist

        key, seconds = self._key(sender), self._spec.timeout_seconds
        _forget(key)
        tell(connection, {"ready": meeting["name"]})
        told(connection, self._deadline)  # everyone is ready
        gpu = meeting["kind"] == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            meeting["host"], meeting["port"], is_master=False, timeout=timedelta(seconds=seconds)
        )
        group = _join(store, meeting["rank"], meeting["size"], device, own_address(self._spec), seconds)
        with _lock:
            _groups[key] = _Group(meeting["name"], meeting["size"], device, group, store)

    def done(self, connection: socket.socket) -> None:
        """Do nothing: the sender does not wait."""

    def _key(self, sender: int) -> tuple[str, str, int, int]:
        return ("receive", self._spec.address, sender, self._receiver)


def _join(store: Any, rank: int, size: int, device: "torch.device", host: str, seconds: float) -> Any:
    """Join a process group that is not registered with torch's own functions. Blocks until all members have joined."""
    import torch.distributed as dist

    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _forget(key: tuple[str, str, int, int]) -> None:
    """Leave a group, if this process is in it."""
    with _lock:
        group = _groups.pop(key, None)
    if group is not None:
        group.abort()
