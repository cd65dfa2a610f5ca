"""A bucket stream: tensors go from a sender directly to the receivers that are present, one bucket at a time.

    receiver  connects to the sender as "stream/SESSION/RECEIVER", and names the group that it is in    {"held": ...}
    sender    waits a limited time for all receivers; later receivers cannot take part
              <- {"meet": {...}}                           if the transport needs it
              <- {"bucket": [entries], "bytes": n, ...}    and the bytes, by the transport
              <- {"end": SESSION}

The transports `broadcast` and `cuda_ipc` move the bytes of a bucket. If a receiver comes too late, or if its stream
breaks, it reads the remaining tensors from the sender's staged copy.
"""

import logging
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, Protocol

from whet.errors import WeightSyncError, WhetError, in_words
from whet.interfaces.weights import TransferSpec
from whet.runtime.channel import receive as receive_message
from whet.runtime.channel import send as send_message
from whet.runtime.wire import decode, encode
from whet_weights.manifest import Entry, Manifest, byte_count, check, checksum, dtype_name, title
from whet_weights.meeting import Offer, address, announce, connect, entries_of, offers, take
from whet_weights.staged_copy import StagedCopy, StreamReceiver, plain, staged_copy_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
BUCKET_BYTES = 256 << 20
"""Largest size of a bucket with several tensors. A larger tensor is a bucket by itself."""
GATHER_SECONDS = 30.0
"""How long a sender with a staged copy waits for receivers. It waits at most half of the deadline of the weight sync.
Receivers that must finish requests first may come later and read the copy."""
ALIGN = 64


class Broken(Exception):  # noqa: N818 - it says what happened
    """The stream cannot be used any more. The weight sync may still succeed through the staged copy."""


class Sending(Protocol):
    """A sender's end of a transport for buckets."""

    def meet(self, receivers: Sequence[StreamReceiver], device: "torch.device") -> None:
        """Prepare for these receivers."""

    def room(self, size: int) -> "torch.Tensor":
        """Return a buffer of `size` bytes for the next bucket."""

    def give(self, head: dict[str, Any], size: int) -> None:
        """Send a bucket to all receivers: its head with `tell`, and the `size` bytes in the buffer."""

    def finish(self) -> None:
        """Wait until no receiver reads the buffer any more."""


class Receiving(Protocol):
    """A receiver's end of a transport for buckets."""

    def choose(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return the senders to read, out of all senders. Raises `Broken`."""

    def copies(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Return the senders whose copies together hold all weights."""

    def hello(self, sender: int) -> dict[str, Any]:
        """Return the message that introduces this receiver to a sender."""

    def meet(self, connection: socket.socket, sender: int, meeting: dict[str, Any]) -> None:
        """Prepare as a sender requests in `meeting` on its connection, before its first bucket. Raises `Broken`."""

    def take(self, connection: socket.socket, sender: int, head: dict[str, Any]) -> "torch.Tensor":
        """Return the bytes of a bucket."""

    def done(self, connection: socket.socket) -> None:
        """Confirm that the bytes of the last bucket have been copied."""


def send(
    spec: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int, plane: Sending, place: str = ""
) -> None:
    """Send the tensors to the receivers that come in time. If `spec.kept` is true, keep a copy for later receivers."""
    copy = staged_copy_of(spec, sender)
    copy.begin(spec, stream=True)
    announce(spec, copy, sender, place)
    patience = min(GATHER_SECONDS, spec.timeout_seconds / 2) if spec.kept else 0.9 * spec.timeout_seconds
    receivers = copy.receivers(spec.receivers, patience)
    stream = _Stream(spec, plane, receivers)
    entries: list[Entry] = []
    with ExitStack() as open_until_the_end:
        for receiver in receivers:
            open_until_the_end.enter_context(closing(receiver.connection))
        try:
            for bucket in _buckets(weights, spec.dtype):
                found = [_entry(spec, copy, name, tensor) for name, tensor in bucket]
                entries += found
                stream.give([tensor for _, tensor in bucket], found)
        except BaseException as error:
            failed = Manifest(spec.session, spec.version, sender, (), in_words(error))
            copy.publish(failed)
            stream.end(failed.failed)
            raise
        copy.publish(Manifest(spec.session, spec.version, sender, tuple(entries if spec.kept else ()), _unkept(spec)))
        stream.end()


def receive(spec: TransferSpec, receiver: int, plane: Receiving) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor, on the device on which it arrives. Raises `WeightSyncError`."""
    deadline = time.monotonic() + spec.timeout_seconds
    found = offers(spec, receiver, deadline)
    given: set[str] = set()
    try:
        for name, tensor in _streams(spec, receiver, plane.choose(found), plane, deadline):
            given.add(name)
            yield name, tensor
    except Broken as error:
        log.warning("%s goes on by connections: %s", title(spec), error)
        yield from take(spec, receiver, plane.copies(found), deadline, given)


def tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message on a connection. Raises `Broken` if the other end is gone."""
    try:
        send_message(connection, encode(message))
    except OSError as error:
        raise Broken(f"the other end is gone: {error}") from error


def told(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next message of a connection. Raises `Broken` if it cannot be received."""
    try:
        message: dict[str, Any] = decode(receive_message(connection, deadline=deadline), records=False)
        return message
    except (OSError, EOFError, WhetError) as error:
        raise Broken(in_words(error)) from error


def is_gone(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection. Call it only while the other end has nothing to send."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


class _Stream:
    """The stream of one sender. After the stream breaks, the sender sends nothing more on it."""

    def __init__(self, spec: TransferSpec, plane: Sending, receivers: Sequence[StreamReceiver]) -> None:
        self._spec, self._plane, self._receivers = spec, plane, receivers
        self._open, self._met = bool(receivers), False

    def give(self, tensors: "Sequence[torch.Tensor]", entries: Sequence[Entry]) -> None:
        """Send a bucket, if there are receivers."""
        if not self._open:
            return
        try:
            if not self._met:
                self._plane.meet(self._receivers, tensors[0].device)
                self._met = True
            places, size = _places(entries)
            room = self._plane.room(size)
            for tensor, place in zip(tensors, places, strict=True):
                flat = room[place : place + tensor.nbytes]
                flat.copy_(tensor.reshape(-1).view(flat.dtype))
            self._plane.give({"bucket": plain(tuple(entries)), "bytes": size}, size)
        except (Broken, RuntimeError, OSError) as error:
            log.warning("%s: receivers go on by connections: %s", title(self._spec), in_words(error))
            self._open = False
            for receiver in self._receivers:
                receiver.connection.close()

    def end(self, failed: str = "") -> None:
        """Send the end of the stream, with the error if it failed."""
        for receiver in self._receivers if self._open else ():
            with suppress(Broken):  # the receiver will report the error itself
                tell(receiver.connection, {"end": self._spec.session, "failed": failed})
        with suppress(Broken):
            self._plane.finish()


def _streams(
    spec: TransferSpec, receiver: int, senders: Sequence[Offer], plane: Receiving, deadline: float
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors of all senders, one sender after another. Every sender waits for this receiver."""
    with ExitStack() as open_until_the_end:
        connections = []
        for offer in senders:
            connection = connect(spec, address(offer), f"stream/{spec.session}/{receiver}")
            connections.append(open_until_the_end.enter_context(closing(connection)))
            tell(connection, plane.hello(offer["sender"]))
        manifests = [Manifest(spec.session, offer["version"], offer["sender"], ()) for offer in senders]
        check(spec, manifests)
        for place, (offer, connection) in enumerate(zip(senders, connections, strict=True)):
            entries: list[Entry] = []
            while "end" not in (head := told(connection, deadline)):
                if "late" in head:
                    raise Broken("it came too late to take part")
                for entry, tensor in _bucket(spec, plane, connection, offer["sender"], head):
                    yield entry.name, tensor
                    entries.append(entry)
            manifests[place] = Manifest(
                spec.session, offer["version"], offer["sender"], tuple(entries), head.get("failed", "")
            )
            check(spec, manifests)


def _bucket(
    spec: TransferSpec, plane: Receiving, connection: socket.socket, sender: int, head: dict[str, Any]
) -> "Iterator[tuple[Entry, torch.Tensor]]":
    """Yield the entries and tensors of a message."""
    import torch

    entries = entries_of(head.get("bucket", ()))
    try:
        if "meet" in head:
            plane.meet(connection, sender, head["meet"])
            return
        data = plane.take(connection, sender, head)
    except (RuntimeError, OSError) as error:
        raise Broken(in_words(error)) from error
    for entry, place in zip(entries, _places(entries)[0], strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        tensor = data[place : place + byte_count(entry)].view(dtype).view(entry.shape)
        found = checksum(tensor)
        if found != entry.checksum:
            raise WeightSyncError(
                f"{title(spec)}: {entry.name} is damaged: checksum {found:08x}, wanted {entry.checksum:08x}"
            )
        yield entry, tensor
    plane.done(connection)


def _buckets(weights: "Iterable[tuple[str, torch.Tensor]]", dtype: str) -> "Iterator[list[tuple[str, torch.Tensor]]]":
    import torch

    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        cast = tensor.detach().to(getattr(torch, dtype) if dtype else tensor.dtype).contiguous()
        if bucket and size + cast.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, cast))
        size += cast.nbytes
    if bucket:
        yield bucket


def _entry(spec: TransferSpec, copy: StagedCopy, name: str, tensor: "torch.Tensor") -> Entry:
    if spec.kept:
        return copy.keep(name, tensor, "")
    return Entry(name, tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor), "")


def _unkept(spec: TransferSpec) -> str:
    """Return the error for receivers that request a copy if none is kept, or "" if a copy is kept."""
    why = "it keeps no copy for receivers that come late, as cluster.recovery allows no replica to be restarted"
    return "" if spec.kept else why


def _places(entries: Iterable[Entry]) -> tuple[list[int], int]:
    """Return where each tensor begins in its bucket, and the size of the bucket, in bytes."""
    places, end = [], 0
    for entry in entries:
        places.append(-(-end // ALIGN) * ALIGN)
        end = places[-1] + byte_count(entry)
    return places, end
