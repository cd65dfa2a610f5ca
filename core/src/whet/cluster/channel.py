"""Messages over a socket: a count, the sizes of the buffers, and the buffers, each aligned to 64 bytes."""

import socket
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from whet.cluster.wire import Buffer, WireError

_MAGIC: Final = 0x31544857
_HEAD: Final = struct.Struct("<II")
_ALIGN: Final = 64
_PADDING: Final = bytes(_ALIGN)
_SMALL: Final = 1 << 16
_MOST_PIECES: Final = 512  # of one sendmsg; the kernel takes 1024
_MOST_BUFFERS: Final = 1 << 20


def send(sock: socket.socket, buffers: Sequence[Buffer]) -> None:
    """Send one message. Blocks while the other end does not read; raises `OSError` when it is gone."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    pieces: list[Buffer] = [_HEAD.pack(_MAGIC, len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)]
    for buffer, size in zip(buffers, sizes, strict=True):
        pieces += (buffer, _PADDING[: -size % _ALIGN])
    if sum(sizes) <= _SMALL:
        sock.sendall(b"".join(pieces))
        return
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while views:
        sent = sock.sendmsg(views[:_MOST_PIECES])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def receive(sock: socket.socket, limit: int = 1 << 42, deadline: float | None = None) -> list[memoryview]:
    """Receive the buffers of one message, writable.

    `limit` bytes are the most that is taken. `deadline` is in the seconds of `time.monotonic`. Raises `EOFError`
    when the other end is gone, `TimeoutError` at the deadline and `WireError` for what is no message.
    """
    magic, count = _HEAD.unpack(_exactly(sock, _HEAD.size, deadline))
    if magic != _MAGIC or count > _MOST_BUFFERS:
        raise WireError("a message is damaged: it has no proper beginning")
    sizes = struct.unpack(f"<{count}Q", _exactly(sock, 8 * count, deadline))
    ends = np.cumsum([0, *((size + _ALIGN - 1) // _ALIGN * _ALIGN for size in sizes)], dtype=object)
    if ends[-1] > limit:
        raise WireError(f"a message of {ends[-1]} bytes was announced, at most {limit} are taken")
    payload = _exactly(sock, int(ends[-1]), deadline)
    return [payload[begin : begin + size] for (begin, _), size in zip(pairwise(ends), sizes, strict=True)]


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> memoryview:
    # An offset into a larger array rather than a bytearray: neither zeroed nor off the alignment of vector code.
    room = np.empty(size + _ALIGN, np.uint8)
    start = -room.ctypes.data % _ALIGN
    view = room[start : start + size].data
    got = 0
    while got < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-4))
        read = sock.recv_into(view[got:], min(size - got, 1 << 24))
        if not read:
            raise EOFError("the other end is gone")
        got += read
    return view
