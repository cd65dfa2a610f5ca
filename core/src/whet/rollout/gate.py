"""A gate before a generator. While it is shut, requests wait, and this time counts against no time limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from whet.interfaces.clock import RUNNING, Clock


class Gate:
    """Requests pass it with `async with gate`. For use from one event loop."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0
        self._clocks: set[Clock] = set()
        """Clocks of the running time limits."""

    async def __aenter__(self) -> None:
        await self._open.wait()
        self._inside += 1
        self._empty.clear()

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def shut(self) -> None:
        """Block new requests, stop the clocks of all time limits, and wait until the requests inside have ended."""
        if self._open.is_set():
            self._open.clear()
            for clock in self._clocks:
                clock.stop()
        await self._empty.wait()

    def open(self) -> None:
        """Admit requests again and restart the clocks. Safe to call twice."""
        if not self._open.is_set():
            self._open.set()
            for clock in self._clocks:
                clock.go()

    def overdue(self) -> float:
        """Return for how many seconds a body has gone on behind its time limit, the longest of all."""
        return max((clock.overdue for clock in self._clocks), default=0.0)

    @asynccontextmanager
    async def time_limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of the body as `asyncio.timeout` does. While the gate is shut the clock stands still."""
        async with asyncio.timeout(seconds if self._open.is_set() else None) as limit:
            clock = Clock(limit, seconds)
            if not self._open.is_set():
                clock.stop()
            self._clocks.add(clock)
            token = RUNNING.set(clock)
            try:
                yield limit
            finally:
                RUNNING.reset(token)
                clock.over = True
                self._clocks.remove(clock)
