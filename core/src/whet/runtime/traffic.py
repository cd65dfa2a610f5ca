"""One thread that sends and receives for all connections of a cluster: a thousand workers need no thousand readers.

A message is sent at once by whoever sends it, as far as the socket takes it; only what is left waits for the thread.
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
    """The thread; it starts with the first line that is opened."""

    def __init__(self, lost: Callable[[str], object] = lambda words: None) -> None:
        """`lost` is called with words if the thread ends unexpectedly: nothing is sent or received any more."""
        self._lost, self._guard = lost, Guard("whet-traffic")
        self._lock = threading.Lock()
        self._orders: deque[Callable[[], None]] = deque()
        """What the thread is to do to its selector, which is its alone."""
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
        """Have the thread do something short; say whether it will."""
        with self._lock:
            if self._stopped:
                return False
            if self._thread is None:
                self._begin()
            self._orders.append(order)
            self._wake()
            return True

    def watch(self, line: "Line", sock: socket.socket, sending: bool) -> None:
        """See to what a line receives and, where something waits, to what it sends. For the thread alone."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, line)
        else:
            self._selector.register(sock, events, line)

    def forget(self, sock: socket.socket) -> None:
        """See to a line no longer. For the thread alone."""
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
        with suppress(BlockingIOError):  # it has been woken often enough
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
        """See to one line. Whatever goes wrong with it, the others must be served."""
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
    """Both directions of one socket. What is sent before it is open waits for that."""

    def __init__(
        self,
        traffic: Traffic,
        take: Callable[[list[memoryview]], Any],
        broken: Callable[[str], None],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one that is not open yet.

        `take` gets the buffers of each message, `broken` why no more will come, and `heard` is called whenever
        anything has come, be it a part of a long message. They run on the one thread of all lines: they must be short,
        and never wait.
        """
        self._traffic, self._take, self._broken, self._heard = traffic, take, broken, heard
        self._incoming = Incoming()
        self._lock = threading.Lock()
        self._waiting: deque[memoryview] = deque()
        self._socket: socket.socket | None = None
        self._deaf = False
        """Whether the other end takes nothing any more."""
        self.over = threading.Event()
        """Set when everything that the other end said has been taken."""

    def open(self, sock: socket.socket) -> None:
        """Begin, with a socket that belongs to this line from now on."""
        sock.setblocking(False)
        with self._lock:
            self._socket = sock
            self._send()
        if not self._traffic.order(self._watch):
            self.shut()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Leave its buffers as they are until it is answered."""
        pieces = frame(buffers)
        with self._lock:
            if self._deaf:
                return
            first = not self._waiting
            self._waiting += pieces
            if not first or self._socket is None or self._send():
                return  # else those before it, or the opening, see to it
        self._traffic.order(self._watch)

    def close(self) -> None:
        """End it, whatever still waits."""
        self._traffic.order(self._leave)

    def give_up(self, cause: str) -> None:
        """Take and send nothing any more. For the thread alone."""
        if self._socket is not None and not self.over.is_set():
            self._break(cause)

    def shut(self) -> None:
        """Close the socket, which the thread must not be using."""
        with self._lock:
            sock, self._socket = self._socket, None
            self._deaf = True
            self._waiting.clear()
        if sock is not None:
            sock.close()
        self.over.set()

    def receive(self, scratch: memoryview) -> None:
        """Take what has come. For the thread alone."""
        if self._socket is None:
            return
        try:
            for message in self._incoming.receive(self._socket, scratch):
                self._take(message)
            self._heard()
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._break("its process closed the connection to the driver")
        except (WhetError, LookupError, TypeError, MemoryError) as error:
            self._break(f"its process sent no proper answer: {error}")
        except Exception as error:  # the edge: whatever is wrong with one line, the others must be served
            log.exception("an answer could not be taken")
            self._break(f"its process sent what the driver could not take: {in_words(error)}")

    def send_waiting(self) -> None:
        """Send what waits, as far as the socket takes it now. For the thread alone."""
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
        """Send once, with the lock held; say whether nothing waits any more."""
        if self._socket is None or not self._waiting:
            return not self._waiting
        try:
            send_some(self._socket, self._waiting)
        except BlockingIOError:
            return False
        except OSError:  # it is gone, which is heard of by receiving
            self._deaf = True
            self._waiting.clear()
        return not self._waiting
