"""A gate before a generator. While it is shut, requests wait, and this time counts against no time limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Requests pass it with `async with gate`. For use from one event loop."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0
        self._limits: dict[asyncio.Timeout, float] = {}
        """Running time limits, with the seconds that were left when the gate was shut."""

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
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                if not limit.expired():
                    self._limits[limit] = max(0.0, (limit.when() or now) - now)
                    limit.reschedule(None)
        await self._empty.wait()

    def open(self) -> None:
        """Admit requests again and restart the clocks. Safe to call twice."""
        if not self._open.is_set():
            self._open.set()
            now = asyncio.get_running_loop().time()
            for limit, left in self._limits.items():
                if not limit.expired():
                    limit.reschedule(now + left)

    @asynccontextmanager
    async def time_limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of the body as `asyncio.timeout` does. While the gate is shut the clock stands still."""
        async with asyncio.timeout(seconds if self._open.is_set() else None) as limit:
            self._limits[limit] = seconds
            try:
                yield limit
            finally:
                del self._limits[limit]
