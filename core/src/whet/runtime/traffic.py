"""One thread that serves the sockets of all connections of a cluster, so that no worker needs a thread of its own."""

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from whet.moved import leading_on
from whet.runtime.threads import Guard, watched

_SCRATCH_BYTES: Final = 1 << 18
_PATIENCE_FOR_THE_THREAD: Final = 5.0


class Traffic:
    """The thread that waits for all sockets. It starts with the first order."""

    def __init__(self, lost: Callable[[str], object] = lambda words: None) -> None:
        """Make it without starting the thread.

        `lost` is called with the reason if the thread ends unexpectedly. Nothing is sent or received after that.
        """
        self.guard, self.scratch = Guard("whet-traffic"), memoryview(bytearray(_SCRATCH_BYTES))
        """The log of the thread's errors, and memory that any function on the thread may use until it returns."""
        self._lost = lost
        self._lock = threading.Lock()
        self._orders: deque[Callable[[], None]] = deque()
        """Functions that the thread is to call. They change its selector, which no other thread may use."""
        self._thread: threading.Thread | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the thread and close all sockets."""
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
                self._selector = selectors.DefaultSelector()
                self._waker, self._woken = socket.socketpair()
                for end in (self._waker, self._woken):
                    end.setblocking(False)
                self._selector.register(self._woken, selectors.EVENT_READ)
                self._thread = watched("whet-traffic", self._run, self._lost, lambda: self._stopped)
            self._orders.append(order)
            self._wake()
            return True

    def watch(self, sock: socket.socket, sending: bool, serve: Callable[[int], None]) -> None:
        """Watch a socket for input and, if `sending`, for room to send. Only the thread calls this.

        `serve` is called with the events that have come, and with 0 when the thread ends. It must not raise.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if sending else 0)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, serve)
        else:
            self._selector.register(sock, events, serve)

    def forget(self, sock: socket.socket) -> None:
        """Watch a socket no longer. Only the thread calls this."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the socket is full, so the thread will wake anyway
            self._waker.send(b"\0")

    def _run(self) -> None:
        while not self._stopped:
            with self.guard.item():
                for key, events in self._selector.select():
                    if key.data is None:
                        self._woken.recv(_SCRATCH_BYTES)
                    else:
                        key.data(events)
            self._obey()
        self._obey()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data(0)
        with self._lock:
            for closing in (self._selector, self._waker, self._woken):
                closing.close()

    def _obey(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            try:
                order()
            except Exception as error:
                self.guard.report(error)


__getattr__ = leading_on(__name__, {"Line": "whet.runtime.channel"})
