"""Hand-over over connections from every receiver to every sender; needs no file system that both see.

    sender     copies its tensors to a buffer of its own, kept from session to session, and tells the exchange
               (`whet.refit.exchange`, on the driver) where it serves them
    receiver   asks the exchange, connects, and takes manifest, bytes and a last word

The last word names the session again: bytes that a newer session wrote over are refused, as are damaged ones.
"""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from whet.cluster.channel import receive as receive_message
from whet.cluster.channel import receive_exactly
from whet.cluster.channel import send as send_message
from whet.cluster.door import Door, knock
from whet.cluster.wire import decode, encode
from whet.errors import RefitError, WhetError, in_words
from whet.refit.link import Link
from whet.refit.manifest import Entry, Manifest, check, checksum, dtype_name, title

if TYPE_CHECKING:
    import torch

_ALIGN = 64
_GROW = 16 << 20
_PATIENCE_SECONDS = 5.0
"""Beyond a deadline, for whoever keeps it to say so."""


def send(link: Link, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int = 0) -> None:
    """Copy the tensors, cast to `link.dtype`, and serve them until the next session."""
    server = _serving(link, sender)
    try:
        server.fill(link, weights, sender)
    except BaseException as error:
        server.publish(Manifest(link.session, link.version, sender, (), in_words(error)))
        raise
    finally:  # connected only now: the exchange does not wait for who has nothing to say yet
        with closing(_connect(link, link.address, f"sender/{link.session}/{sender}")) as exchange:
            send_message(exchange, encode({"version": link.version, "address": list(server.door.address)}))


def receive(link: Link, receiver: int = 0) -> "Iterator[tuple[str, torch.Tensor]]":
    """Give every tensor. Raises `RefitError` for a missing, stale, contradictory or damaged hand-over."""
    deadline = time.monotonic() + link.timeout_seconds
    addresses = _senders(link, receiver, deadline)
    with ExitStack() as open_until_the_end:
        connections, manifests = [], []
        for sender, (host, port) in enumerate(addresses):
            connection = _connect(link, f"{host}:{port}", f"receiver/{link.session}/{receiver}")
            connections.append(open_until_the_end.enter_context(closing(connection)))
            manifests.append(_manifest(link, sender, _said(link, connection, deadline)))
        check(link, manifests)
        for connection, manifest in zip(connections, manifests, strict=True):
            for entry in manifest.entries:
                yield entry.name, _tensor(link, entry, connection, deadline)
            if _said(link, connection, deadline).get("session") != link.session:
                raise RefitError(
                    f"{title(link)}: sender {manifest.sender} began another session while this one was read"
                )


class _Server:
    """The buffer of one sender, and the door at which receivers ask for it."""

    def __init__(self, address: str, token: str) -> None:
        self.token = token
        self._buffer = np.empty(0, np.uint8)
        self._manifest: Manifest | None = None
        self._timeout = 0.0
        self._lock = threading.Lock()
        self.door = Door(address, bytes.fromhex(token), self._serve, purpose="hand-overs of weights")

    def fill(self, link: Link, weights: "Iterable[tuple[str, torch.Tensor]]", sender: int) -> None:
        """Copy tensors and publish them."""
        with self._lock:
            self._manifest, self._timeout = None, link.timeout_seconds
        entries: list[Entry] = []
        begin = 0
        for name, tensor in weights:
            stored, end = self._store(begin, tensor, link.dtype)
            entries.append(Entry(name, tuple(tensor.shape), dtype_name(stored.dtype), checksum(stored), "", begin))
            begin = -(-end // _ALIGN) * _ALIGN
        self.publish(Manifest(link.session, link.version, sender, tuple(entries)))

    def publish(self, manifest: Manifest) -> None:
        """Serve this from now on."""
        with self._lock:
            self._manifest = manifest

    def _store(self, begin: int, tensor: "torch.Tensor", dtype: str) -> "tuple[torch.Tensor, int]":
        import torch

        kind = getattr(torch, dtype) if dtype else tensor.dtype
        end = begin + tensor.numel() * kind.itemsize
        if end > self._buffer.nbytes:
            larger = np.empty(max(end, self._buffer.nbytes + min(self._buffer.nbytes, 64 * _GROW), _GROW), np.uint8)
            larger[:begin] = self._buffer[:begin]
            self._buffer = larger
        stored: torch.Tensor = torch.from_numpy(self._buffer)[begin:end].view(kind).view(tensor.shape)
        stored.copy_(tensor.detach())
        return stored, end

    def _serve(self, name: str, guest: socket.socket) -> None:
        """Give a receiver what there is of its session."""
        _, session, _ = name.split("/")
        with closing(guest):
            with self._lock:
                manifest, buffer = self._manifest, self._buffer
                guest.settimeout(self._timeout)
            if manifest is None or manifest.session != session:
                found = "none that is complete" if manifest is None else f"session {manifest.session}"
                send_message(guest, encode({"refused": f"it holds {found}"}))
                return
            send_message(guest, encode({"manifest": {**attrs.asdict(manifest), "entries": _plain(manifest)}}))
            for entry in manifest.entries:
                guest.sendall(buffer[entry.offset : entry.offset + _bytes(entry)].data)
            with self._lock:
                now = "" if self._manifest is None else self._manifest.session
            send_message(guest, encode({"session": now}))


_servers: dict[tuple[str, int], _Server] = {}
"""Of this process, by address of the exchange and sender."""
_servers_lock = threading.Lock()


def _serving(link: Link, sender: int) -> _Server:
    with _servers_lock:
        found = _servers.get((link.address, sender))
        if found is None or found.token != link.token:
            found = _servers[link.address, sender] = _Server(_own_address(link), link.token)
        return found


def _own_address(link: Link) -> str:
    """Give the address from which this process reaches the driver: the one at which the other nodes reach it."""
    host, _, port = link.address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _connect(link: Link, address: str, name: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        connection = knock((host, int(port)), bytes.fromhex(link.token), name)
    except (OSError, EOFError, WhetError, ValueError) as error:
        raise RefitError(f"{title(link)}: no connection to {address}: {in_words(error)}") from error
    connection.settimeout(link.timeout_seconds)
    return connection


def _senders(link: Link, receiver: int, deadline: float) -> list[tuple[str, int]]:
    with closing(_connect(link, link.address, f"receiver/{link.session}/{receiver}")) as exchange:
        seconds = deadline - time.monotonic()
        send_message(exchange, encode({"senders": link.senders, "seconds": seconds}))
        found = {offer["sender"]: offer for offer in _said(link, exchange, deadline + _PATIENCE_SECONDS)["found"]}
    wanted = range(link.senders)
    missing = [n for n in wanted if n not in found or found[n]["session"] != link.session]
    if missing:
        seen = [
            f"session {found[n]['session']}, version {found[n]['version']}" if n in found else "none" for n in missing
        ]
        raise RefitError(
            f"{title(link)}: {len(missing)} of {link.senders} senders did not come to {link.address}, after "
            f"{link.timeout_seconds:g} s; found of "
            + "; ".join(f"sender {n}: {what}" for n, what in zip(missing, seen, strict=True))
        )
    return [(str(found[n]["address"][0]), int(found[n]["address"][1])) for n in wanted]


def _said(link: Link, connection: socket.socket, deadline: float) -> dict[str, Any]:
    try:
        said: dict[str, Any] = decode(receive_message(connection, deadline=deadline), records=False)
        return said
    except (OSError, EOFError, WhetError) as error:
        raise _cut(link, error) from error


def _manifest(link: Link, sender: int, said: dict[str, Any]) -> Manifest:
    if "manifest" not in said:
        raise RefitError(f"{title(link)}: sender {sender} refused it: {said.get('refused')}")
    entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in said["manifest"].pop("entries"))
    return Manifest(**{**said["manifest"], "sender": sender}, entries=entries)


def _tensor(link: Link, entry: Entry, connection: socket.socket, deadline: float) -> "torch.Tensor":
    import torch

    try:
        data = receive_exactly(connection, _bytes(entry), deadline)
    except (OSError, EOFError) as error:
        raise _cut(link, error) from error
    flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    tensor: torch.Tensor = flat.view(getattr(torch, entry.dtype)).view(entry.shape)
    found = checksum(tensor)
    if found != entry.checksum:
        raise RefitError(
            f"{title(link)}: {entry.name} is damaged: checksum {found:08x}, wanted {entry.checksum:08x}; its "
            "sender may have begun another session"
        )
    return tensor


def _cut(link: Link, error: BaseException) -> RefitError:
    why = f"it took more than {link.timeout_seconds:g} s" if isinstance(error, TimeoutError) else in_words(error)
    return RefitError(f"{title(link)}: it ended half way: {why}")


def _bytes(entry: Entry) -> int:
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype.itemsize * torch.Size(entry.shape).numel()


def _plain(manifest: Manifest) -> list[dict[str, Any]]:
    return [{**attrs.asdict(entry), "shape": list(entry.shape)} for entry in manifest.entries]
