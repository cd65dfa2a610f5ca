"""An event loop on its own thread, which plays all episodes of a run."""

import asyncio
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import WhetError, outside_libraries
from whet.rollout.gate import Gate
from whet.runtime.threads import watched

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TICK_SECONDS = 0.2
"""Time between two calls of the `tick` of a caller that waits."""
_MOST_PLACES = 4
CLOSE_SECONDS = 5.0
"""How long closing waits for code that does not return to the loop."""
_LEFT: list[Any] = []
"""Tasks that went on when they were cancelled. As garbage they would show errors of coroutines that are broken off."""


class EpisodeLoop:
    """Runs coroutines for a caller that waits on another thread, usually the driver's main one.

    A signal or `KeyboardInterrupt` during the wait cancels the coroutine and reaches the caller at once. If code keeps
    the loop busy for `stall_seconds` without awaiting anything, the caller gets an error with its file and line.
    """

    def __init__(self, stall_seconds: float = 300.0) -> None:
        self._stall_seconds = stall_seconds
        self.events = asyncio.new_event_loop()
        """The event loop of asyncio."""
        self._lost = ""
        """Why the thread ended unexpectedly; empty while the thread runs."""
        self._closing = False
        self._thread = watched("whet episodes", self.events.run_forever, self._lose, lambda: self._closing)

    def run(self, coroutine: Coroutine[Any, Any, Result], tick: Callable[[], None] = lambda: None) -> Result:
        """Run a coroutine and return its result. Meanwhile call `tick` on this thread a few times a second."""
        if self.events.is_closed():
            coroutine.close()
            raise WhetError("the run has ended, so no episode can be played any more; call this before the run ends")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(coroutine, self.events)
        alive, answer = time.monotonic(), None
        try:
            while not _done(future, TICK_SECONDS):
                if self._lost:
                    raise WhetError(f"{self._lost}; no episode can be played any more")
                if answer is None or answer.done():
                    alive, answer = time.monotonic(), asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.events)
                elif time.monotonic() - alive > self._stall_seconds:
                    raise self._stalled()
                tick()
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a plain function on the loop's thread and return its result."""

        async def calling() -> Result:
            return function(*args)

        return self.run(calling())

    def where(self) -> list[str]:
        """Return the places where tasks wait, the most common first, e.g. `8 at environment.py:60 in run`.

        Before them comes the place of code that runs just now: it keeps all others waiting if it does not await.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        running = outside_libraries(traceback.extract_stack(frame))[-1:] if frame else []
        busy = [f"running {Path(one.filename).name}:{one.lineno} in {one.name}, all others wait" for one in running]
        try:
            return busy + _places(asyncio.all_tasks(self.events))
        except RuntimeError:  # tasks came and went while they were counted
            return busy

    def refuse_overdue(self, gate: Gate) -> None:
        """Raise `WhetError` if a time limit of the gate is over for `stall_seconds`, and its body goes on."""
        overdue = self.call(gate.overdue)
        if overdue > self._stall_seconds:
            raise WhetError(
                f"an episode goes on {overdue:.0f} seconds behind its time limit (cluster.deadlines.episode): "
                f"{', '.join(self.where())}; code that catches asyncio.CancelledError must raise it again"
            )

    def try_run(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Run a coroutine that cleans up. Return whether it ended within a few seconds."""
        return _done(asyncio.run_coroutine_threadsafe(coroutine, self.events), CLOSE_SECONDS)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Safe to call twice."""
        if self.events.is_closed() or not self._thread.is_alive():
            return
        if not self.try_run(_cancel_all()):
            return  # code that never returns keeps the daemon thread until the process ends
        self._closing = True
        self.events.call_soon_threadsafe(self.events.stop)
        self._thread.join()
        self.events.close()

    def _lose(self, words: str) -> None:
        self._lost = words

    def _stalled(self) -> WhetError:
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
        return WhetError(
            f"an environment keeps all others waiting: for {self._stall_seconds:g} seconds its code has run without "
            f"awaiting anything; put slow work into a GraderPool or asyncio.to_thread. It is at:\n{where}"
        )


def _places(tasks: "Iterable[asyncio.Task[Any]]") -> list[str]:
    places = Counter(place for task in tasks if (place := _place(task)))
    return [f"{count} at {place}" for place, count in places.most_common(_MOST_PLACES)]


def _place(task: "asyncio.Task[Any]") -> str:
    """Return the file, line and name of a task's innermost coroutine outside asyncio; empty if there is none."""
    place = ""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent.name != "asyncio":
            place = f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None)
    return place


def _done(future: "Future[Any]", seconds: float) -> bool:
    try:
        future.exception(seconds)
    except TimeoutError:
        return False
    return True


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all coroutines at once. Return their results in order; the first error cancels the others and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _cancel_all() -> None:
    """Cancel all other tasks. A task that does not end within a second is left behind, with its generators."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks and (left := (await asyncio.wait(tasks, timeout=1.0))[1]):
        _LEFT.extend(left)
        log.warning("%d tasks go on although they were cancelled: %s", len(left), ", ".join(_places(left)))
        return
    await asyncio.get_running_loop().shutdown_asyncgens()
