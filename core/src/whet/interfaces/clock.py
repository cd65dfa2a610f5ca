"""The clock of an episode's deadline. It stands still while the episode waits for its turn.

    with stopped_clock():        # anywhere below the environment, e.g. in a library that limits what runs at a time
        await place

Otherwise episodes that keep a place for long would make others fail that have done nothing yet.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

RUNNING: ContextVar["Clock | None"] = ContextVar("whet_clock", default=None)


class Clock:
    """A time limit that can be stopped. Its loop alone may use it."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit, self._left = limit, seconds
        self.loop, self._stops = asyncio.get_running_loop(), 0
        self.over = False
        """Whether the limited body has ended."""

    @property
    def here(self) -> bool:
        """Return whether it runs in this event loop, and its body has not ended."""
        return not self.over and not self._limit.expired() and asyncio._get_running_loop() is self.loop

    @property
    def overdue(self) -> float:
        """Return for how many seconds its body has gone on behind the limit."""
        when = self._limit.when() if self._limit.expired() and not self.over else None
        return 0.0 if when is None else self.loop.time() - when

    def stop(self) -> None:
        """Stop the clock. It goes on after as many calls of `go`."""
        self._stops += 1
        if self._stops == 1 and self.here:
            now, when = self.loop.time(), self._limit.when()
            self._left = self._left if when is None else max(0.0, when - now)
            self._limit.reschedule(None)

    def go(self) -> None:
        """Undo one `stop`."""
        self._stops -= 1
        if not self._stops and self.here:
            self._limit.reschedule(self.loop.time() + self._left)


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop the clock of the running episode for the block. Outside of an episode, and on a thread, it has no effect."""
    clock = RUNNING.get()
    if clock is None or not clock.here:
        yield
        return
    clock.stop()
    try:
        yield
    finally:
        clock.go()


async def on_loop(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Await a coroutine on another event loop than the caller's; by default on that of the running episode."""
    clock, here = RUNNING.get(), asyncio.get_running_loop()
    loop = loop or (clock.loop if clock else here)
    if loop is here:
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
