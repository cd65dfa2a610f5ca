"""Limits on a server's handshakes and on the log of its refusals: many strangers cannot keep the run's clients out."""

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
"""Time in which a handshake cannot lose its place.

A client that knows the token answers at once. A thousand strangers are done after 1.6 s.
"""
_TOLD_ONE_BY_ONE: Final = 5
_COUNT_EVERY_SECONDS: Final = 60.0


class Greetings:
    """The handshakes under way, in a limited number of places.

    When all places are taken, the address that holds the most places loses its oldest handshake.
    """

    def __init__(self) -> None:
        self._under_way: dict[socket.socket, tuple[str, float]] = {}
        """The address of each client and the time at which it came, the oldest first."""
        self._put_out: set[socket.socket] = set()
        self._changed = threading.Condition()

    def enter(self, client: socket.socket, host: str) -> None:
        """Wait for a place and take it."""
        with self._changed:
            while len(self._under_way) >= _MOST:
                self._changed.wait(self._put_one_out())
            self._under_way[client] = host, time.monotonic()

    def leave(self, client: socket.socket) -> bool:
        """Release the place, and return whether the client may stay. After this the client cannot be put out."""
        with self._changed:
            del self._under_way[client]
            self._changed.notify()
            stays = client not in self._put_out
            self._put_out.discard(client)
            return stays

    def _put_one_out(self) -> float:
        """End one handshake, unless it is too young. Return the seconds to wait before the next attempt."""
        held = Counter(host for host, _ in self._under_way.values())
        most = max(held.values())
        client, begin = next((g, begin) for g, (host, begin) in self._under_way.items() if held[host] == most)
        left = begin + _SURE_SECONDS - time.monotonic()
        if left > 0:
            return left
        self._put_out.add(client)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # wakes the client's thread, which waits for a message
        return _SURE_SECONDS


class Refusals:
    """Logs refused clients: the first few one by one, and then their number from time to time."""

    def __init__(self) -> None:
        self._count = self._told = 0
        self._next = 0.0
        self._last = ""
        self._lock = threading.Lock()

    def add(self, words: str) -> None:
        """Count a refusal, and log it or the number of refusals if that is due."""
        with self._lock:
            self._count, self._last = self._count + 1, words
            if self._count <= _TOLD_ONE_BY_ONE:
                self._told, self._next = self._count, time.monotonic() + _COUNT_EVERY_SECONDS
                log.warning("%s", words)
            elif time.monotonic() >= self._next:
                self._tell()

    def close(self) -> None:
        """Log the number of refusals that are not logged yet."""
        with self._lock:
            if self._told < self._count:
                self._tell()

    def _tell(self) -> None:
        log.warning("%d more like this; the last: %s", self._count - self._told, self._last)
        self._told, self._next = self._count, time.monotonic() + _COUNT_EVERY_SECONDS
