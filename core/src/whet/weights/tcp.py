"""Weight sync over connections from every receiver to every sender. It needs no shared file system.

sender     copies its tensors to a buffer of its own, kept from session to session (`staged_copy`), and tells the
           exchange (`whet.weights.exchange`, on the driver) where it serves them
receiver   asks the exchange unless the link has the places, connects, perhaps before the sender has begun, and
           reads manifest, bytes and a last message
"""

import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from whet.errors import WeightSyncError, WhetError, in_words
from whet.interfaces.weights import TransferSpec
from whet.runtime.channel import receive as receive_message
from whet.runtime.channel import receive_exactly
from whet.runtime.channel import send as send_message
from whet.runtime.door import knock
from whet.runtime.wire import decode, encode
from whet.weights.manifest import Entry, Manifest, byte_count, check, checksum, title
from whet.weights.staged_copy import KeptCopy, kept_copy

if TYPE_CHECKING:
    import torch

_PATIENCE_SECONDS = 5.0
"""Extra time after a deadline, so that the other end can report that it missed it."""
Offer = dict[str, Any]
"""What a sender reported: `sender`, `address`, `place`, and what it sent last: `session`, `version`."""


class UnreachableError(WeightSyncError):
    """A sender, or the exchange, cannot be reached."""


def send(link: TransferSpec, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Copy the tensors, cast to `link.dtype`, and serve them until the next session."""
    copy = kept_copy(link, sender)
    copy.begin(link)
    entries: list[Entry] = []
    try:
        for name, tensor in weights:
            entries.append(copy.keep(name, tensor, link.dtype))
        copy.publish(Manifest(link.session, link.version, sender, tuple(entries)))
    except BaseException as error:
        copy.publish(Manifest(link.session, link.version, sender, (), in_words(error)))
        raise
    finally:  # connected only now: the exchange does not wait for who has nothing to say yet
        announce(link, copy, sender)


def receive(link: TransferSpec, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor. Raises `WeightSyncError` for a missing, stale, inconsistent or damaged transfer."""
    deadline = time.monotonic() + link.timeout_seconds
    if len(link.places) == link.senders:
        try:
            yield from take(link, receiver, [dict(place) for place in link.places], deadline)
            return
        except UnreachableError:
            pass  # it is elsewhere now, and nothing was given yet
    yield from take(link, receiver, offers(link, receiver, deadline), deadline)


def announce(link: TransferSpec, copy: KeptCopy, sender: int, place: str = "") -> None:
    """Report to the exchange where a sender is. `place`: its GPU."""
    with closing(connect(link, link.address, f"sender/{link.session}/{sender}")) as exchange:
        words = {"version": link.version, "address": list(copy.door.address), "place": place}
        send_message(exchange, encode(words))
        said(link, exchange, time.monotonic() + link.timeout_seconds)


def offers(link: TransferSpec, receiver: int, deadline: float) -> list[Offer]:
    """Wait until all senders of a session have reported where they are, and return their offers. Raises
    `WeightSyncError`.
    """
    with closing(connect(link, link.address, f"receiver/{link.session}/{receiver}")) as exchange:
        seconds = deadline - time.monotonic()
        send_message(exchange, encode({"senders": link.senders, "seconds": seconds}))
        found = {offer["sender"]: offer for offer in said(link, exchange, deadline + _PATIENCE_SECONDS)["found"]}
    wanted = range(link.senders)
    missing = [n for n in wanted if n not in found or found[n]["session"] != link.session]
    if missing:
        seen = [
            f"session {found[n]['session']}, version {found[n]['version']}" if n in found else "none" for n in missing
        ]
        raise WeightSyncError(
            f"{title(link)}: {len(missing)} of {link.senders} senders did not come to {link.address}, after "
            f"{link.timeout_seconds:g} s; found of "
            + "; ".join(f"sender {n}: {what}" for n, what in zip(missing, seen, strict=True))
        )
    return [found[n] for n in wanted]


def take(
    link: TransferSpec, receiver: int, senders: Sequence[Offer], deadline: float, given: Collection[str] = ()
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors in these senders' copies, except the names in `given`."""
    with ExitStack() as open_until_the_end:
        connections, manifests = [], []
        for offer in senders:
            connection = connect(link, address(offer), f"receiver/{link.session}/{receiver}")
            connections.append(open_until_the_end.enter_context(closing(connection)))
            first = said(link, connection, deadline + _PATIENCE_SECONDS)
            manifests.append(_manifest(link, offer["sender"], first))
        check(link, manifests)
        for connection, manifest in zip(connections, manifests, strict=True):
            for entry in manifest.entries:
                tensor = _tensor(link, entry, connection, deadline)
                if entry.name not in given:
                    yield entry.name, tensor
            if said(link, connection, deadline).get("session") != link.session:
                raise WeightSyncError(
                    f"{title(link)}: sender {manifest.sender} began another session while this one was read"
                )


def connect(link: TransferSpec, address: str, name: str) -> socket.socket:
    """Return a connection to the exchange or a sender under a name. Raises `UnreachableError`."""
    host, _, port = address.rpartition(":")
    try:
        connection = knock((host, int(port)), bytes.fromhex(link.token), name)
    except (OSError, EOFError, WhetError, ValueError) as error:
        raise UnreachableError(f"{title(link)}: no connection to {address}: {in_words(error)}") from error
    connection.settimeout(link.timeout_seconds)
    return connection


def address(offer: Offer) -> str:
    """Return the address of a sender."""
    host, port = offer["address"]
    return f"{host}:{int(port)}"


def said(link: TransferSpec, connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next message. Raises `WeightSyncError`."""
    try:
        message: dict[str, Any] = decode(receive_message(connection, deadline=deadline), records=False)
        return message
    except (OSError, EOFError, WhetError) as error:
        raise _cut(link, error) from error


def entries_of(documents: Iterable[dict[str, Any]]) -> tuple[Entry, ...]:
    """Return the entries that `plain` wrote."""
    return tuple(Entry(**{**document, "shape": tuple(document["shape"])}) for document in documents)


def _manifest(link: TransferSpec, sender: int, message: dict[str, Any]) -> Manifest:
    if "manifest" not in message:
        raise WeightSyncError(f"{title(link)}: sender {sender} refused it: {message.get('refused')}")
    entries = entries_of(message["manifest"].pop("entries"))
    return Manifest(**{**message["manifest"], "sender": sender}, entries=entries)


def _tensor(link: TransferSpec, entry: Entry, connection: socket.socket, deadline: float) -> "torch.Tensor":
    import torch

    try:
        data = receive_exactly(connection, byte_count(entry), deadline)
    except (OSError, EOFError) as error:
        raise _cut(link, error) from error
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(getattr(torch, entry.dtype)).view(entry.shape)
    found = checksum(tensor)
    if found != entry.checksum:
        raise WeightSyncError(
            f"{title(link)}: {entry.name} is damaged: checksum {found:08x}, wanted {entry.checksum:08x}; its "
            "sender may have begun another session"
        )
    return tensor


def _cut(link: TransferSpec, error: BaseException) -> WeightSyncError:
    why = f"it took more than {link.timeout_seconds:g} s" if isinstance(error, TimeoutError) else in_words(error)
    return WeightSyncError(f"{title(link)}: it ended half way: {why}")
