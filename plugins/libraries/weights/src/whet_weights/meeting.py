"""How the ends of a bucket stream find each other, and how a late receiver reads a sender's staged copy.

sender     tells the exchange (`whet_weights.exchange`, on the driver) where it is
receiver   asks the exchange, and connects to the senders; where its stream breaks, it connects again and reads the
           staged copies (`staged_copy`): manifest, bytes and a last message
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
from whet.runtime.wire import decode, encode
from whet_weights.handshake import connect_to
from whet_weights.manifest import Entry, Manifest, byte_count, check, checksum, title
from whet_weights.staged_copy import StagedCopy

if TYPE_CHECKING:
    import torch

_PATIENCE_SECONDS = 5.0
"""Extra time after a deadline, so that the other end can report that it missed it."""
Offer = dict[str, Any]
"""What a sender reported: `sender`, `address`, `place`, and what it sent last: `session`, `version`."""


class UnreachableError(WeightSyncError):
    """A sender, or the exchange, cannot be reached."""


def announce(spec: TransferSpec, copy: StagedCopy, sender: int, place: str = "") -> None:
    """Report to the exchange where a sender is. `place`: its GPU."""
    with closing(connect(spec, spec.address, f"sender/{spec.session}/{sender}")) as exchange:
        words = {"version": spec.version, "address": list(copy.server.address), "place": place}
        send_message(exchange, encode(words))
        said(spec, exchange, time.monotonic() + spec.timeout_seconds)


def offers(spec: TransferSpec, receiver: int, deadline: float) -> list[Offer]:
    """Wait until all senders of a session have reported where they are, and return their offers. Raises
    `WeightSyncError`.
    """
    with closing(connect(spec, spec.address, f"receiver/{spec.session}/{receiver}")) as exchange:
        seconds = deadline - time.monotonic()
        send_message(exchange, encode({"senders": spec.senders, "seconds": seconds}))
        found = {offer["sender"]: offer for offer in said(spec, exchange, deadline + _PATIENCE_SECONDS)["found"]}
    wanted = range(spec.senders)
    missing = [n for n in wanted if n not in found or found[n]["session"] != spec.session]
    if missing:
        seen = [
            f"session {found[n]['session']}, version {found[n]['version']}" if n in found else "none" for n in missing
        ]
        raise WeightSyncError(
            f"{title(spec)}: {len(missing)} of {spec.senders} senders did not come to {spec.address}, after "
            f"{spec.timeout_seconds:g} s; found of "
            + "; ".join(f"sender {n}: {what}" for n, what in zip(missing, seen, strict=True))
        )
    return [found[n] for n in wanted]


def take(
    spec: TransferSpec, receiver: int, senders: Sequence[Offer], deadline: float, given: Collection[str] = ()
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors in these senders' copies, except the names in `given`."""
    with ExitStack() as open_until_the_end:
        connections, manifests = [], []
        for offer in senders:
            connection = connect(spec, address(offer), f"receiver/{spec.session}/{receiver}")
            connections.append(open_until_the_end.enter_context(closing(connection)))
            first = said(spec, connection, deadline + _PATIENCE_SECONDS)
            manifests.append(_manifest(spec, offer["sender"], first))
        check(spec, manifests)
        for connection, manifest in zip(connections, manifests, strict=True):
            for entry in manifest.entries:
                tensor = _tensor(spec, entry, connection, deadline)
                if entry.name not in given:
                    yield entry.name, tensor
            if said(spec, connection, deadline).get("session") != spec.session:
                raise WeightSyncError(
                    f"{title(spec)}: sender {manifest.sender} began another session while this one was read"
                )


def connect(spec: TransferSpec, address: str, name: str) -> socket.socket:
    """Return a connection to the exchange or a sender under a name. Raises `UnreachableError`."""
    host, _, port = address.rpartition(":")
    try:
        connection = connect_to((host, int(port)), bytes.fromhex(spec.token), name)
    except (OSError, EOFError, WhetError, ValueError) as error:
        raise UnreachableError(f"{title(spec)}: no connection to {address}: {in_words(error)}") from error
    connection.settimeout(spec.timeout_seconds)
    return connection


def address(offer: Offer) -> str:
    """Return the address of a sender."""
    host, port = offer["address"]
    return f"{host}:{int(port)}"


def said(spec: TransferSpec, connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next message. Raises `WeightSyncError`."""
    try:
        message: dict[str, Any] = decode(receive_message(connection, deadline=deadline), records=False)
        return message
    except (OSError, EOFError, WhetError) as error:
        raise _cut(spec, error) from error


def entries_of(documents: Iterable[dict[str, Any]]) -> tuple[Entry, ...]:
    """Return the entries that `plain` wrote."""
    return tuple(Entry(**{**document, "shape": tuple(document["shape"])}) for document in documents)


def _manifest(spec: TransferSpec, sender: int, message: dict[str, Any]) -> Manifest:
    if "manifest" not in message:
        raise WeightSyncError(f"{title(spec)}: sender {sender} refused it: {message.get('refused')}")
    entries = entries_of(message["manifest"].pop("entries"))
    return Manifest(**{**message["manifest"], "sender": sender}, entries=entries)


def _tensor(spec: TransferSpec, entry: Entry, connection: socket.socket, deadline: float) -> "torch.Tensor":
    import torch

    try:
        data = receive_exactly(connection, byte_count(entry), deadline)
    except (OSError, EOFError) as error:
        raise _cut(spec, error) from error
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(getattr(torch, entry.dtype)).view(entry.shape)
    found = checksum(tensor)
    if found != entry.checksum:
        raise WeightSyncError(
            f"{title(spec)}: {entry.name} is damaged: checksum {found:08x}, wanted {entry.checksum:08x}; its "
            "sender may have begun another session"
        )
    return tensor


def _cut(spec: TransferSpec, error: BaseException) -> WeightSyncError:
    why = f"it took more than {spec.timeout_seconds:g} s" if isinstance(error, TimeoutError) else in_words(error)
    return WeightSyncError(f"{title(spec)}: it ended half way: {why}")
