"""What keeps a door open for who belongs to the run, however many strangers come: places, and what is said of them."""

import logging
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Final

log = logging.getLogger(__name__)

_MOST: Final = 64
"""Handshakes under way at one time, each with a thread."""
_SURE_SECONDS: Final = 0.1
"""That a handshake has for itself. Who knows the token answers at once; a thousand strangers are through in 1.6 s."""
_TOLD_ONE_BY_ONE: Final = 5
_COUNT_EVERY_SECONDS: Final = 60.0


class Greetings:
    """The handshakes under way. Where all places are taken, the oldest of the address that has the most makes room."""

    def __init__(self) -> None:
        self._under_way: dict[socket.socket, tuple[str, float]] = {}
        """Where each guest comes from and since when it is here, the oldest first."""
        self._put_out: set[socket.socket] = set()
        self._changed = threading.Condition()

    def enter(self, guest: socket.socket, host: str) -> None:
        """Take a place, once there is one."""
        with self._changed:
            while len(self._under_way) >= _MOST:
                self._changed.wait(self._put_one_out())
            self._under_way[guest] = host, time.monotonic()

    def leave(self, guest: socket.socket) -> bool:
        """Give the place back, and say whether the guest may stay; from here on it is not put out any more."""
        with self._changed:
            del self._under_way[guest]
            self._changed.notify()
            stays = guest not in self._put_out
            self._put_out.discard(guest)
            return stays

    def _put_one_out(self) -> float:
        """End one handshake, or none yet; give the seconds after which to look again."""
        held = Counter(host for host, _ in self._under_way.values())
        most = max(held.values())
        guest, begin = next((g, begin) for g, (host, begin) in self._under_way.items() if held[host] == most)
        left = begin + _SURE_SECONDS - time.monotonic()
        if left > 0:
            return left
        self._put_out.add(guest)
        with suppress(OSError):
            guest.shutdown(socket.SHUT_RDWR)  # its thread, which waits for what it says, hears that it is gone
        return _SURE_SECONDS


class Refusals:
    """Logs who was refused: the first few one by one, and then how many there were, now and then."""

    def __init__(self) -> None:
        self._count = self._told = 0
        self._next = 0.0
        self._last = ""
        self._lock = threading.Lock()

    def add(self, words: str) -> None:
        """Tell of one."""
        with self._lock:
            self._count, self._last = self._count + 1, words
            if self._count <= _TOLD_ONE_BY_ONE:
                self._told, self._next = self._count, time.monotonic() + _COUNT_EVERY_SECONDS
                log.warning("%s", words)
            elif time.monotonic() >= self._next:
                self._tell()

    def close(self) -> None:
        """Tell of those that are not told yet."""
        with self._lock:
            if self._told < self._count:
                self._tell()

    def _tell(self) -> None:
        log.warning("%d more like this; the last: %s", self._count - self._told, self._last)
        self._told, self._next = self._count, time.monotonic() + _COUNT_EVERY_SECONDS
