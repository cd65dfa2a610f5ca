"""A lane: tensors go from a sender straight to the receivers that are there, a bucket at a time.

    receiver  knocks at the sender's door as "lane/SESSION/RECEIVER", says what it has            {"held": ...}
    sender    waits a while for all of them; from then on nobody else takes part
              <- {"meet": {...}}                           where that is needed
              <- {"bucket": [entries], "bytes": n, ...}    and the bytes by whatever the lane is made of
              <- {"end": SESSION}

What it is made of moves the bytes of a bucket: `broadcast`, `cuda_ipc`. A receiver that comes too
late, and those whose lane breaks, take what is left from the sender's kept copy, as by the transport `tcp`.
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
from whet.weights.manifest import Entry, Manifest, byte_count, check, checksum, dtype_name, title
from whet.weights.staged_copy import Guest, KeptCopy, kept_copy, plain
from whet.weights.tcp import Offer, address, announce, connect, entries_of, offers, take

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
BUCKET_BYTES = 256 << 20
"""A bucket is sent once it holds this much; a larger tensor is a bucket by itself."""
GATHER_SECONDS = 30.0
"""How long a sender that keeps a copy waits for receivers, at most half of the hand-over's deadline. Those that have
requests to finish may come later, and take the copy."""
ALIGN = 64


class Broken(Exception):  # noqa: N818 - it says what happened
    """The lane is of no more use; the hand-over may be."""


class Sending(Protocol):
    """One sender's end of what a lane is made of."""

    def meet(self, guests: Sequence[Guest], device: "torch.device") -> None:
        """Get ready for these receivers."""

    def room(self, size: int) -> "torch.Tensor":
        """Give so many bytes to write the next bucket to."""

    def give(self, head: dict[str, Any], size: int) -> None:
        """Send a bucket's head by `tell` to all guests, and the bytes that were written."""

    def finish(self) -> None:
        """Wait until nobody reads what was sent any more."""


class Receiving(Protocol):
    """One receiver's end."""

    def choose(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Give the senders to hear, of all that there are. Raises `Broken`."""

    def copies(self, senders: Sequence[Offer]) -> Sequence[Offer]:
        """Give the senders whose copies make a whole."""

    def hello(self, sender: int) -> dict[str, Any]:
        """Give what a sender is told of this receiver."""

    def meet(self, sender: int, meeting: dict[str, Any]) -> None:
        """Do as a sender says before its first bucket."""

    def take(self, connection: socket.socket, sender: int, head: dict[str, Any]) -> "torch.Tensor":
        """Give the bytes of a bucket."""

    def done(self, connection: socket.socket) -> None:
        """The bytes of the last bucket have been copied."""


def send(
    link: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int, plane: Sending, place: str = ""
) -> None:
    """Send to who comes in time, and keep a copy for the others where `link.kept` says so."""
    copy = kept_copy(link, sender)
    copy.begin(link, lane=True)
    announce(link, copy, sender, place)
    patience = min(GATHER_SECONDS, link.timeout_seconds / 2) if link.kept else 0.9 * link.timeout_seconds
    guests = copy.guests(link.receivers, patience)
    lane = _Lane(link, plane, guests)
    entries: list[Entry] = []
    with ExitStack() as open_until_the_end:
        for guest in guests:
            open_until_the_end.enter_context(closing(guest.connection))
        try:
            for bucket in _buckets(weights, link.dtype):
                found = [_entry(link, copy, name, tensor) for name, tensor in bucket]
                entries += found
                lane.give([tensor for _, tensor in bucket], found)
        except BaseException as error:
            failed = Manifest(link.session, link.version, sender, (), in_words(error))
            copy.publish(failed)
            lane.end(failed.failed)
            raise
        copy.publish(Manifest(link.session, link.version, sender, tuple(entries if link.kept else ()), _unkept(link)))
        lane.end()


def receive(link: TransferSpec, receiver: int, plane: Receiving) -> "Iterator[tuple[str, torch.Tensor]]":
    """Give every tensor, on whatever device it comes. Raises `WeightSyncError`."""
    deadline = time.monotonic() + link.timeout_seconds
    found = offers(link, receiver, deadline)
    given: set[str] = set()
    try:
        for name, tensor in _lanes(link, receiver, plane.choose(found), plane, deadline):
            given.add(name)
            yield name, tensor
    except Broken as error:
        log.warning("%s goes on by connections: %s", title(link), error)
        yield from take(link, receiver, plane.copies(found), deadline, given)


def tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message along a lane. Raises `Broken` where nobody is there."""
    try:
        send_message(connection, encode(message))
    except OSError as error:
        raise Broken(f"the other end is gone: {error}") from error


def told(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Wait for a message. Raises `Broken`."""
    try:
        message: dict[str, Any] = decode(receive_message(connection, deadline=deadline), records=False)
        return message
    except (OSError, EOFError, WhetError) as error:
        raise Broken(in_words(error)) from error


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it says nothing now."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


class _Lane:
    """From one sender; once it is broken, nothing more goes along it."""

    def __init__(self, link: TransferSpec, plane: Sending, guests: Sequence[Guest]) -> None:
        self._link, self._plane, self._guests = link, plane, guests
        self._open, self._met = bool(guests), False

    def give(self, tensors: "Sequence[torch.Tensor]", entries: Sequence[Entry]) -> None:
        """Send a bucket, if anyone is there."""
        if not self._open:
            return
        try:
            if not self._met:
                self._plane.meet(self._guests, tensors[0].device)
                self._met = True
            places, size = _places(entries)
            room = self._plane.room(size)
            for tensor, place in zip(tensors, places, strict=True):
                flat = room[place : place + tensor.nbytes]
                flat.copy_(tensor.reshape(-1).view(flat.dtype))
            self._plane.give({"bucket": plain(tuple(entries)), "bytes": size}, size)
        except (Broken, RuntimeError, OSError) as error:
            log.warning("%s: receivers go on by connections: %s", title(self._link), in_words(error))
            self._open = False
            for guest in self._guests:
                guest.connection.close()

    def end(self, failed: str = "") -> None:
        """Say that this was all, or why not."""
        for guest in self._guests if self._open else ():
            with suppress(Broken):  # it will say so itself
                tell(guest.connection, {"end": self._link.session, "failed": failed})
        with suppress(Broken):
            self._plane.finish()


def _lanes(
    link: TransferSpec, receiver: int, senders: Sequence[Offer], plane: Receiving, deadline: float
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Hear the senders one after another, all of which wait for this receiver."""
    with ExitStack() as open_until_the_end:
        connections = []
        for offer in senders:
            connection = connect(link, address(offer), f"lane/{link.session}/{receiver}")
            connections.append(open_until_the_end.enter_context(closing(connection)))
            tell(connection, plane.hello(offer["sender"]))
        manifests = [Manifest(link.session, offer["version"], offer["sender"], ()) for offer in senders]
        check(link, manifests)
        for place, (offer, connection) in enumerate(zip(senders, connections, strict=True)):
            entries: list[Entry] = []
            while "end" not in (head := told(connection, deadline)):
                if "late" in head:
                    raise Broken("it came too late to take part")
                for entry, tensor in _bucket(link, plane, connection, offer["sender"], head):
                    yield entry.name, tensor
                    entries.append(entry)
            manifests[place] = Manifest(
                link.session, offer["version"], offer["sender"], tuple(entries), head.get("failed", "")
            )
            check(link, manifests)


def _bucket(
    link: TransferSpec, plane: Receiving, connection: socket.socket, sender: int, head: dict[str, Any]
) -> "Iterator[tuple[Entry, torch.Tensor]]":
    """Give what a message brings."""
    import torch

    entries = entries_of(head.get("bucket", ()))
    try:
        if "meet" in head:
            plane.meet(sender, head["meet"])
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
                f"{title(link)}: {entry.name} is damaged: checksum {found:08x}, wanted {entry.checksum:08x}"
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


def _entry(link: TransferSpec, copy: KeptCopy, name: str, tensor: "torch.Tensor") -> Entry:
    if link.kept:
        return copy.keep(name, tensor, "")
    return Entry(name, tuple(tensor.shape), dtype_name(tensor.dtype), checksum(tensor), "")


def _unkept(link: TransferSpec) -> str:
    """Tell those that come for a copy that there is none."""
    why = "it keeps no copy for receivers that come late, as cluster.recovery allows no replica to be restarted"
    return "" if link.kept else why


def _places(entries: Iterable[Entry]) -> tuple[list[int], int]:
    """Give where each tensor begins in its bucket, and how long that is."""
    places, end = [], 0
    for entry in entries:
        places.append(-(-end // ALIGN) * ALIGN)
        end = places[-1] + byte_count(entry)
    return places, end
