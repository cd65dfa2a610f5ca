"""A gate that lets a limited number of tasks in, also tasks of several event loops."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from whet.interfaces.clock import stopped_clock


class Gate:
    """Lets at most `places` tasks in at a time, in the order in which they come."""

    def __init__(self, places: int) -> None:
        self._free, self._lock = places, threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it for the block. Waiting counts against no deadline of an episode."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn = loop.create_future()
            self._waiting.append((loop, turn))
        try:
            with stopped_clock():
                await turn
        except asyncio.CancelledError:
            with self._lock:
                waits = (loop, turn) in self._waiting
                if waits:
                    self._waiting.remove((loop, turn))
            if not waits:  # the place was given at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                with suppress(RuntimeError):  # the loop is closed: its task will never come
                    loop.call_soon_threadsafe(_let_in, turn)
                    return
            self._free += 1


def _let_in(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
