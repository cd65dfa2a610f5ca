"""The staged copy: what a sender sent last, kept in memory until its next session, and the server for receivers.

    "receiver/SESSION/0"   <- {"manifest": {...}}, the bytes of every tensor, {"session": SESSION}; a receiver that
                           comes before its session has begun waits for the next session
    "stream/SESSION/0"     a receiver that takes part while the tensors are sent, see `whet_weights.bucket_stream`

The last message of a receiver's connection names the session again: bytes that a newer session overwrote are refused.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import attrs

from whet.interfaces.weights import TransferSpec
from whet.runtime.channel import receive as receive_message
from whet.runtime.channel import send as send_message
from whet.runtime.wire import decode, encode
from whet_weights.handshake import Server
from whet_weights.manifest import Entry, Manifest, byte_count, checksum, dtype_name

if TYPE_CHECKING:
    import torch

_ALIGN = 64
_SLAB_BYTES = 64 << 20
"""A power of two, to which torch rounds a piece of pinned memory. It never gives one back, so pieces do not grow."""
_HELLO_SECONDS = 10.0
_LARGEST_HELLO = 1 << 16
_SESSIONS_KNOWN = 256


@attrs.frozen
class StreamReceiver:
    """A receiver that came in time to take part in a session."""

    connection: socket.socket
    said: dict[str, Any]


class StagedCopy:
    """The staged copy of one sender in this process."""

    def __init__(self, address: str, token: str) -> None:
        self.token = token
        self._slabs: list[torch.Tensor] = []
        """Host memory in pieces of one size, in which the bytes lie one after another."""
        self._end = 0
        self._session, self._timeout = "", 0.0
        self._begun: deque[str] = deque(maxlen=_SESSIONS_KNOWN)
        """Sessions that have begun. A receiver that names another one has come before its session."""
        self._manifest: Manifest | None = None
        self._receivers: list[StreamReceiver] | None = None
        """Receivers of the running session; None: it admits no more."""
        self._changed = threading.Condition()
        self.server = Server(address, bytes.fromhex(token), self._serve, purpose="weight syncs")

    def begin(self, spec: TransferSpec, *, stream: bool = False) -> None:
        """Begin a session: discard the published manifest. `stream`: admit receivers while this session is sent."""
        with self._changed:
            self._session, self._timeout, self._manifest = spec.session, spec.timeout_seconds, None
            self._begun.append(spec.session)
            self._receivers = [] if stream else None
            self._end = 0
            self._changed.notify_all()

    def receivers(self, count: int, seconds: float) -> list[StreamReceiver]:
        """Wait up to `seconds` for `count` receivers, and return the receivers that connected. After that, no other
        receiver can take part.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._receivers or ()) >= count, seconds)
            found, self._receivers = self._receivers or [], None
            return found

    def keep(self, name: str, tensor: "torch.Tensor", dtype: str) -> Entry:
        """Copy a tensor, cast to `dtype` (empty: not cast), and return its entry."""
        import torch

        kind = getattr(torch, dtype) if dtype else tensor.dtype
        data = tensor.detach().to(kind).reshape(-1).view(torch.uint8)
        begin = -(-self._end // _ALIGN) * _ALIGN
        self._end = begin + len(data)
        while len(self._slabs) * _SLAB_BYTES < self._end:  # a GPU writes fast to pinned memory
            self._slabs.append(torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda))
        done = 0
        for piece in self._pieces(begin, self._end):
            piece.copy_(data[done : done + len(piece)])
            done += len(piece)
        return Entry(name, tuple(tensor.shape), dtype_name(kind), checksum(data), "", begin)

    def _pieces(self, begin: int, end: int) -> "Iterator[torch.Tensor]":
        """Yield the pieces of memory from one byte to another."""
        while begin < end:
            slab, offset = divmod(begin, _SLAB_BYTES)
            size = min(end - begin, _SLAB_BYTES - offset)
            yield self._slabs[slab][offset : offset + size]
            begin += size

    def publish(self, manifest: Manifest) -> None:
        """Serve this manifest from now on."""
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    def _serve(self, name: str, connection: socket.socket) -> None:
        kind, session, _ = name.split("/")
        if kind == "stream":
            self._admit(session, connection)
        else:
            with closing(connection):
                self._give(session, connection)

    def _admit(self, session: str, connection: socket.socket) -> None:
        """Admit a receiver to the stream, or tell it that it came too late."""
        said = decode(receive_message(connection, _LARGEST_HELLO, time.monotonic() + _HELLO_SECONDS), records=False)
        with self._changed:
            connection.settimeout(self._timeout)
            if self._session == session and self._receivers is not None:
                self._receivers.append(StreamReceiver(connection, said))
                self._changed.notify_all()
                return
        with closing(connection):
            send_message(connection, encode({"late": True}))

    def _give(self, session: str, connection: socket.socket) -> None:
        """Send a receiver the copy of its session. If the session is running, wait until it is complete."""
        with self._changed:
            before, until = self._session, time.monotonic() + self._timeout
            if session not in self._begun:
                self._changed.wait_for(lambda: self._session != before, self._timeout)
            connection.settimeout(self._timeout)
            self._changed.wait_for(
                lambda: self._session != session or self._manifest is not None, max(0.0, until - time.monotonic())
            )
            held, manifest = self._session, self._manifest
        if manifest is None or manifest.session != session:
            found = f"session {held}" if manifest else f"session {held}, which is not complete"
            send_message(connection, encode({"refused": f"it holds {found}"}))
            return
        send_message(connection, encode({"manifest": {**attrs.asdict(manifest), "entries": plain(manifest.entries)}}))
        for entry in manifest.entries:
            for piece in self._pieces(entry.offset, entry.offset + byte_count(entry)):
                connection.sendall(piece.numpy().data)
        with self._changed:
            now = "" if self._manifest is None else self._manifest.session
        send_message(connection, encode({"session": now}))


def staged_copy_of(spec: TransferSpec, sender: int) -> StagedCopy:
    """Return the copy of a sender in this process, which is the same for all sessions of a run."""
    with _lock:
        found = _copies.get((spec.address, sender))
        if found is None or found.token != spec.token:
            found = _copies[spec.address, sender] = StagedCopy(own_address(spec), spec.token)
        return found


_copies: dict[tuple[str, int], StagedCopy] = {}
"""Copies by address of the exchange and sender."""
_lock = threading.Lock()


def own_address(spec: TransferSpec) -> str:
    """Return the address from which this process reaches the driver, and at which other nodes reach this process."""
    host, _, port = spec.address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def plain(entries: tuple[Entry, ...]) -> list[dict[str, Any]]:
    """Return entries in the form in which they are sent."""
    return [{**attrs.asdict(entry), "shape": list(entry.shape)} for entry in entries]
