"""One thread that sends and receives for all connections of a cluster, so that each worker needs no thread of its own.

The caller's thread sends a message at once, as far as the socket accepts it. This thread sends the rest.
"""

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from whet.errors import WhetError, in_words
from whet.runtime.channel import Incoming, frame, send_some
from whet.runtime.threads import Guard, watched
from whet.runtime.wire import Buffer

log = logging.getLogger(__name__)

_SCRATCH_BYTES: Final = 1 << 18
_PATIENCE_FOR_THE_THREAD: Final = 5.0


class Traffic:
    """The thread that serves all lines. It starts when the first line is opened."""

    def __init__(self, lost: Callable[[str], object] = lambda words: None) -> None:
        """Make it without starting the thread.

        `lost` is called with the reason if the thread ends unexpectedly. Nothing is sent or received after that.
        """
        self._lost, self._guard = lost, Guard("whet-traffic")
        self._lock = threading.Lock()
        self._orders: deque[Callable[[], None]] = deque()
        """Functions that the thread is to call. They change its selector, which no other thread may use."""
        self._thread: threading.Thread | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the thread and close all lines."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
            if stopped or self._thread is None:
                return
            self._wake()
        self._thread.join(_PATIENCE_FOR_THE_THREAD)

    def order(self, order: Callable[[], None]) -> bool:
        """Queue a short function for the thread. Return whether the thread will call it."""
        with self._lock:
            if self._stopped:
                return False
            if self._thread is None:
                self._begin()
            self._orders.append(order)
            self._wake()
            return True

    def watch(self, line: "Line", sock: socket.socket, sending: bool) -> None:
        """Watch a line's socket for input and, if `sending`, for room to send. Only the thread calls this."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, line)
        else:
            self._selector.register(sock, events, line)

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no longer. Only the thread calls this."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _begin(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = watched("whet-traffic", self._run, self._lost, lambda: self._stopped)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the socket is full, so the thread will wake anyway
            self._waker.send(b"\0")

    def _run(self) -> None:
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while not self._stopped:
            with self._guard.item():
                for key, events in self._selector.select():
                    if key.data is None:
                        self._woken.recv(_SCRATCH_BYTES)
                    else:
                        self._serve(key.data, events, scratch)
            self._obey()
        self._obey()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.shut()
        with self._lock:
            for closing in (self._selector, self._waker, self._woken):
                closing.close()

    def _serve(self, line: "Line", events: int, scratch: memoryview) -> None:
        """Receive and send for one line. An error of this line must not stop the other lines."""
        try:
            if events & selectors.EVENT_READ:
                line.receive(scratch)
            if events & selectors.EVENT_WRITE:
                line.send_waiting()
        except Exception as error:
            self._guard.report(error)
            line.give_up(f"the driver could not serve its connection: {in_words(error)}")

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            try:
                order()
            except Exception as error:
                self._guard.report(error)


class Line:
    """Both directions of one socket. Messages that are sent before the line is open wait until it opens."""

    def __init__(
        self,
        traffic: Traffic,
        take: Callable[[list[memoryview]], Any],
        broken: Callable[[str], None],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
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
            self.shut()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Do not change its buffers before its answer has come."""
        pieces = frame(buffers)
        with self._lock:
            if self._deaf:
                return
            first = not self._waiting
            self._waiting += pieces
            if not first or self._socket is None or self._send():
                return  # what is left is sent after earlier messages, or when the line opens
        self._traffic.order(self._watch)

    def close(self) -> None:
        """Close the line, and drop messages that still wait."""
        self._traffic.order(self._leave)

    def give_up(self, cause: str) -> None:
        """Stop sending and receiving, and call `broken` with the cause. Only the thread calls this."""
        if self._socket is not None and not self.over.is_set():
            self._break(cause)

    def shut(self) -> None:
        """Close the socket. The thread must not be using it."""
        with self._lock:
            sock, self._socket = self._socket, None
            self._deaf = True
            self._waiting.clear()
        if sock is not None:
            sock.close()
        self.over.set()

    def receive(self, scratch: memoryview) -> None:
        """Receive what has arrived, and call `take` with each complete message. Only the thread calls this."""
        if self._socket is None:
            return
        try:
            for message in self._incoming.receive(self._socket, scratch):
                self._take(message)
            self._heard()
        except BlockingIOError:
            return
        except Exception as error:  # the edge: an error of one line must not stop the other lines
            self._break(fault_of(error))

    def send_waiting(self) -> None:
        """Send waiting messages, as far as the socket accepts them now. Only the thread calls this."""
        with self._lock:
            self._send()
        self._watch()

    def _watch(self) -> None:
        with self._lock:
            sock, sending = self._socket, bool(self._waiting)
        if sock is not None and not self.over.is_set():
            try:
                self._traffic.watch(self, sock, sending)
            except OSError as error:  # the system watches no more sockets
                self._break(f"the driver cannot listen to it: {error}")

    def _leave(self) -> None:
        if self._socket is not None:
            self._traffic.forget(self._socket)
        self.shut()

    def _break(self, cause: str) -> None:
        assert self._socket is not None
        self._traffic.forget(self._socket)
        with self._lock:
            self._deaf = True
            self._waiting.clear()
        self.over.set()
        self._broken(cause)

    def _send(self) -> bool:
        """Send once, while the caller holds the lock. Return whether nothing waits any more."""
        if self._socket is None or not self._waiting:
            return not self._waiting
        try:
            send_some(self._socket, self._waiting)
        except BlockingIOError:
            return False
        except OSError:  # the other end is gone, which `receive` notices and reports
            self._deaf = True
            self._waiting.clear()
        return not self._waiting


def fault_of(error: Exception) -> str:
    """Return why no more messages can be taken from a process, given what receiving or taking one has raised."""
    if isinstance(error, EOFError | OSError):
        return "its process closed the connection to the driver"
    if isinstance(error, WhetError | LookupError | TypeError | MemoryError):
        return f"its process sent no proper answer: {error}"
    log.error("an answer could not be taken", exc_info=error)
    return f"its process sent what the driver could not take: {in_words(error)}"
