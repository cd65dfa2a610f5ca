"""Find what blocks an event loop: while the loop waits for one episode, all other episodes wait too."""

import asyncio
import linecache
import math
import sys
import threading
import time
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

import pytest

TICK_SECONDS = 0.05
ADVICE = "await it (asyncio.sleep), or run it in a thread (asyncio.to_thread) or in processes (GraderPool)"

Result = TypeVar("Result")


def run_unblocked(episode: Coroutine[Any, Any, Result], most_seconds: float) -> Result:
    """Run a coroutine in an event loop of its own and return its result. Fail the test if it blocks the loop.

    A call of `time.sleep` blocks, however short. Anything else blocks if the loop does not turn during
    `most_seconds`, counted in ticks of a second thread: a busy machine delays both threads.
    """
    found: list[str] = []
    over = threading.Event()

    async def watched() -> Result:
        arguments = (asyncio.get_running_loop(), threading.get_ident(), most_seconds, found, over)
        watchdog = threading.Thread(target=_watch, args=arguments, daemon=True)
        watchdog.start()
        try:
            return await episode
        finally:
            over.set()

    before = sys.getprofile()
    sys.setprofile(lambda frame, event, called: _note_sleep(frame, called, found) if event == "c_call" else None)
    try:
        return asyncio.run(watched())
    finally:
        sys.setprofile(before)
        over.set()
        if found:
            pytest.fail(f"the episode blocks the event loop, and with it all other episodes: {found[0]}; {ADVICE}")


def _note_sleep(frame: FrameType, called: Any, found: list[str]) -> None:
    if called is time.sleep:
        found.append(f"it calls time.sleep {_place(frame)}")


def _watch(
    loop: asyncio.AbstractEventLoop, thread: int, most_seconds: float, found: list[str], over: threading.Event
) -> None:
    """Ask the loop to turn, again and again. Note where its thread is once it has not turned for too many ticks."""
    while not over.wait(TICK_SECONDS):
        turned = threading.Event()
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # the loop is closed
            return
        for _ in range(math.ceil(most_seconds / TICK_SECONDS)):
            if turned.wait(TICK_SECONDS) or over.is_set():
                break
        else:
            frame = sys._current_frames().get(thread)
            found.append(f"the loop did not turn for {most_seconds:g} seconds {_place(frame)}")
            return


def _place(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename == __file__:  # the profile function above
        frame = frame.f_back
    if frame is None:
        return "in a thread that has ended"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"in {frame.f_code.co_name} at {file}:{line}: {linecache.getline(file, line).strip()}"
