"""Messages over a socket: a count, the sizes of the buffers, and the buffers, each aligned to 64 bytes.

A worker process waits in `send` and `receive`. The driver has a `Line` to each process, which never waits: the caller's
thread sends a message as far as the socket accepts it, and the one thread of `whet.runtime.traffic` does the rest.
"""

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, Final

import numpy as np

from whet.errors import WhetError, in_words
from whet.runtime.traffic import Traffic
from whet.runtime.wire import Buffer, WireError

log = logging.getLogger(__name__)

_MAGIC: Final = 0x31544857
_HEAD: Final = struct.Struct("<II")
_BARE: Final = struct.Struct("<IIQ")
"""Count and size of a message of one buffer."""
_ALIGN: Final = 64
_PADDING: Final = bytes(_ALIGN)
_SMALL: Final = 1 << 16
_MOST_PIECES: Final = 512  # in one sendmsg; the kernel takes 1024
_MOST_BUFFERS: Final = 1 << 20
_FEW_BUFFERS: Final = 1 << 10
"""Most buffers of a small message. A large message may have one buffer for each KiB of its limit."""
_LIMIT: Final = 1 << 42


class Framed(list[memoryview]):
    """The pieces of one message, in order."""

    stored: Any = None
    """What a launcher has made of the pieces to carry them to several processes, if it does so."""


def frame(buffers: Sequence[Buffer]) -> Framed:
    """Return the pieces of one message. A small message is copied into a single piece; a large one is not copied.

    A message that is framed already is returned as it is.
    """
    if isinstance(buffers, Framed):
        return buffers
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    pieces: list[Buffer] = [_HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)]
    for buffer, size in zip(buffers, sizes, strict=True):
        pieces += (buffer, _PADDING[: -size % _ALIGN])
    if sum(sizes) <= _SMALL:
        return Framed([memoryview(b"".join(pieces))])
    return Framed(memoryview(piece).cast("B") for piece in pieces if len(piece))


def send(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send one message. Blocks while the other end does not read; raises `OSError` when the other end is gone."""
    pieces = deque(frame(buffers))
    if len(pieces) == 1:
        sock.sendall(pieces[0])
        return
    while pieces:
        send_some(sock, pieces)


def send_some(sock: socket.socket, pieces: deque[memoryview]) -> None:
    """Send once, and remove from `pieces` what was sent.

    Raises `BlockingIOError` when a non-blocking socket accepts nothing.
    """
    sent = sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(list(islice(pieces, _MOST_PIECES)))
    while pieces and sent >= len(pieces[0]):
        sent -= len(pieces.popleft())
    if sent:
        pieces[0] = pieces[0][sent:]


def receive(sock: socket.socket, limit: int = _LIMIT, deadline: float | None = None) -> list[memoryview]:
    """Receive one message and return its buffers, which are writable.

    A message of more than `limit` bytes is refused. `deadline` is in the seconds of `time.monotonic`. Raises `EOFError`
    when the other end is gone, `TimeoutError` at the deadline, and `WireError` when the bytes are not a valid message.
    """
    count = _count(receive_exactly(sock, _HEAD.size, deadline), limit)
    shape = _Shape(receive_exactly(sock, 8 * count, deadline), limit)
    return shape.cut(receive_exactly(sock, shape.size, deadline))


class Incoming:
    """Assembles messages from the bytes that have arrived, without waiting for the rest."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._begin, self._wanted = bytearray(), _HEAD.size
        """The bytes of a message's count and sizes that have arrived, and how many bytes these must become."""
        self._shape: _Shape | None = None
        self._payload = memoryview(b"")
        self._got = 0
        """Bytes of the payload that have arrived."""

    def receive(self, sock: socket.socket, scratch: memoryview) -> Iterator[list[memoryview]]:
        """Receive once, and yield the buffers, which are writable, of each message that is complete now.

        The beginning of a message is received into `scratch` and copied from there. `scratch` is free again after the
        last message. The rest of a large message is received directly into its final memory. Raises the errors of the
        function `receive`, and `BlockingIOError` when nothing has arrived.
        """
        rest = self._payload[self._got :]
        got = sock.recv_into(rest or scratch)
        if not got:
            raise EOFError("the other end is gone")
        if rest:
            self._got += got
            yield from self._whole()
            return
        yield from self.feed(scratch[:got])

    def feed(self, data: memoryview) -> Iterator[list[memoryview]]:
        """Take bytes that have arrived, and yield each message that is complete now.

        The bytes are copied. They are free again after the last message.
        """
        while data:
            if self._shape is None and not self._begin and 0 < (size := _bare_size(data)) <= self._limit:
                room = _room(size)
                room[:] = data[_BARE.size : _BARE.size + size]
                data = data[_BARE.size + size + -size % _ALIGN :]
                yield [room]
                continue
            data = self._announce(data) if self._shape is None else self._fill(data)
            yield from self._whole()

    def _announce(self, data: memoryview) -> memoryview:
        """Take the bytes of `data` that belong to a message's count and sizes. Return the bytes after them."""
        missing = self._wanted - len(self._begin)
        self._begin += data[:missing]
        if len(self._begin) == self._wanted == _HEAD.size:
            self._wanted += 8 * _count(self._begin, self._limit)
        if len(self._begin) == self._wanted:
            self._shape = _Shape(memoryview(self._begin)[_HEAD.size :], self._limit)
            self._payload = _room(self._shape.size)
            self._begin, self._wanted = bytearray(), _HEAD.size
        return data[missing:]

    def _fill(self, data: memoryview) -> memoryview:
        """Take the bytes of `data` that belong to the payload. Return the bytes after them."""
        part = data[: len(self._payload) - self._got]
        self._payload[self._got : self._got + len(part)] = part
        self._got += len(part)
        return data[len(part) :]

    def _whole(self) -> Iterator[list[memoryview]]:
        """Yield the message, if it is complete now."""
        if self._shape is not None and self._got == len(self._payload):
            message = self._shape.cut(self._payload)
            self._shape, self._payload, self._got = None, memoryview(b""), 0
            yield message


class _Shape:
    """Where the buffers of a message lie in its payload."""

    def __init__(self, announced: Buffer, limit: int) -> None:
        self._sizes = struct.unpack(f"<{len(announced) // 8}Q", announced)
        self._begins = list(accumulate((size + -size % _ALIGN for size in self._sizes), initial=0))
        self.size = self._begins[-1]
        """Bytes of the payload."""
        if self.size > limit:
            raise WireError(f"a message of {self.size} bytes was announced, at most {limit} are taken")

    def cut(self, payload: memoryview) -> list[memoryview]:
        return [payload[begin : begin + size] for begin, size in zip(self._begins, self._sizes, strict=False)]


def _bare_size(data: memoryview) -> int:
    """Return the size of the only buffer of the message that `data` begins with.

    0: the message is not complete, or it does not have exactly one buffer.
    """
    if len(data) < _BARE.size:
        return 0
    magic, count, size = _BARE.unpack_from(data)
    whole = magic == _MAGIC and count == 1 and len(data) >= _BARE.size + size + -size % _ALIGN
    return int(size) if whole else 0


def _count(head: Buffer, limit: int) -> int:
    """Return how many buffers a message has.

    Raises `WireError` when no message begins here, or when it has too many buffers for its limit.
    """
    magic, count = _HEAD.unpack_from(head)
    if magic != _MAGIC or count > min(_MOST_BUFFERS, max(_FEW_BUFFERS, limit >> 10)):
        raise WireError("a message is damaged: it has no proper beginning")
    return int(count)


def _room(size: int) -> memoryview:
    """Return writable, aligned memory of `size` bytes."""
    # Part of a larger array instead of a bytearray: the memory is not zeroed, and it is aligned for vector code.
    room = np.empty(size + _ALIGN, np.uint8)
    start = -room.ctypes.data % _ALIGN
    return room[start : start + size].data


def receive_exactly(sock: socket.socket, size: int, deadline: float | None) -> memoryview:
    """Receive `size` bytes and return them in writable, aligned memory.

    Raises `EOFError` when the other end is gone, and `TimeoutError` at the deadline.
    """
    view, got = _room(size), 0
    while got < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-4))
        read = sock.recv_into(view[got:], min(size - got, 1 << 24))
        if not read:
            raise EOFError("the other end is gone")
        got += read
    return view


class Line:
    """Both directions of one socket. Messages that are sent before the line is open wait until it opens."""

    def __init__(
        self, traffic: Traffic, take: Callable[[list[memoryview]], Any], broken: Callable[[str], None],
        heard: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Make a line that is not open yet.

        `take` is called with the buffers of each message. `broken` is called with the reason when no more messages will
        come. `heard` is called whenever any bytes have arrived, also a part of a long message. They run on the one
        thread of all lines, so they must be short and never wait.
        """
        self._traffic, self._take, self._broken, self._heard = traffic, take, broken, heard
        self._incoming = Incoming()
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._socket: socket.socket | None = None
        self._deaf = False
        """Whether nothing can be sent to the other end any more."""
        self.over = threading.Event()
        """Set when everything that the other end sent has been received, or when the line is closed."""

    def open(self, sock: socket.socket) -> None:
        """Start to send and receive over a socket. The line owns the socket from then on."""
        sock.setblocking(False)
        with self._lock:
            self._socket = sock
            self._send()
        if not self._traffic.order(self._watch):
            self._shut()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Do not change its buffers before its answer has come."""
        pieces = frame(buffers)
        with self._lock:
            if self._deaf:
                return
            first = not self._waiting
            self._waiting += pieces
            if first:
                self._send()
            if not first or self._socket is None or not self._waiting:
                return  # what is left is sent after earlier messages, or when the line opens
        self._traffic.order(self._watch)

    def close(self) -> None:
        """Close the line, and drop messages that still wait."""
        self._traffic.order(self._close)

    def _serve(self, events: int) -> None:
        """Receive and send as far as possible. An error of this line must not stop the other lines."""
        try:
            if events & EVENT_READ:
                self._receive()
            if events & EVENT_WRITE:
                with self._lock:
                    self._send()
                self._watch()
            if not events:
                self._shut()
        except Exception as error:
            self._traffic.guard.report(error)
            self._break(f"the driver could not serve its connection: {in_words(error)}")

    def _receive(self) -> None:
        if self._socket is None:
            return
        try:
            for message in self._incoming.receive(self._socket, self._traffic.scratch):
                self._take(message)
            self._heard()
        except BlockingIOError:
            return
        except Exception as error:  # the edge: whatever a process sends, the other lines go on
            self._break(fault_of(error))

    def _watch(self) -> None:
        with self._lock:
            sock, sending = self._socket, bool(self._waiting)
        if sock is not None and not self.over.is_set():
            try:
                self._traffic.watch(sock, sending, self._serve)
            except OSError as error:  # the system watches no more sockets
                self._break(f"the driver cannot listen to it: {error}")

    def _break(self, cause: str) -> None:
        """Send and receive no more, and report why. The socket stays open until the process has ended."""
        if self._socket is None or self.over.is_set():
            return
        self._traffic.forget(self._socket)
        with self._lock:
            self._deaf = True
            self._waiting.clear()
        self.over.set()
        self._broken(cause)

    def _close(self) -> None:
        if self._socket is not None:
            self._traffic.forget(self._socket)
        self._shut()

    def _shut(self) -> None:
        """Close the socket, which the traffic does not watch any more."""
        with self._lock:
            sock, self._socket = self._socket, None
            self._deaf = True
            self._waiting.clear()
        if sock is not None:
            sock.close()
        self.over.set()

    def _send(self) -> None:
        """Send once. The caller holds the lock."""
        if self._socket is None or not self._waiting:
            return
        try:
            send_some(self._socket, self._waiting)
        except BlockingIOError:
            return
        except OSError:  # the other end is gone, which `_receive` notices and reports
            self._deaf = True
            self._waiting.clear()


def fault_of(error: Exception) -> str:
    """Return why no more messages can be taken from a process, given what receiving or taking one has raised."""
    if isinstance(error, EOFError | OSError):
        return "its process closed the connection to the driver"
    if isinstance(error, WhetError | LookupError | TypeError | MemoryError):
        return f"its process sent no proper answer: {error}"
    log.error("an answer could not be taken", exc_info=error)
    return f"its process sent what the driver could not take: {in_words(error)}"
