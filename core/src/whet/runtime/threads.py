"""Long-lived threads. A thread survives an item of work that raises, and no thread ends without a report.

    watched(name, run, lost)      start a thread; call `lost` with the reason if the thread ends unexpectedly
    Guard(name).item()            around one item of the thread's work: log an error once, and let the thread continue

A thread ends, and is reported as lost, when `MOST_IN_A_ROW` items in a row raise: it would do nothing but fail.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from whet.errors import in_words, place_of

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_IN_A_ROW = 50
PAUSE_SECONDS = 0.05
"""Seconds to sleep after an item that raised, so that a permanent fault does not use a whole core."""


class Guard:
    """Logs the errors of a long-lived thread's items and lets the thread continue.

    It logs an error once for each type and place in the code.
    """

    def __init__(self, thread: str, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._thread, self._pause_seconds = thread, pause_seconds
        self._told = set[tuple[str, str]]()
        self._in_a_row = 0

    @contextmanager
    def item(self) -> Iterator[None]:
        """Catch and log what one item of work raises. Raise it once `MOST_IN_A_ROW` items in a row have raised."""
        try:
            yield
        except Exception as error:
            self._in_a_row += 1
            self.report(error)
            if self._in_a_row >= MOST_IN_A_ROW:
                raise
            time.sleep(self._pause_seconds)
        else:
            self._in_a_row = 0

    def report(self, error: Exception) -> None:
        """Log an error, unless an error of the same type from the same place was logged before."""
        found = (type(error).__name__, place_of(error))
        if found not in self._told:
            self._told.add(found)
            with suppress(Exception):  # the log itself may be closed or broken
                log.error("the thread %s goes on after an error: %s", self._thread, in_words(error))


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on a thread of its own where this thread runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def watched(
    name: str,
    run: Callable[[], object],
    lost: Callable[[str], object] = lambda words: None,
    over: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """Start a daemon thread and return it. If it raises, or returns while `over()` is false, call `lost`.

    `lost` gets the reason as a sentence, which is also printed to stderr. It runs on the thread, as its last act.
    """

    def living() -> None:
        why = "it returned"
        try:
            run()
        except BaseException as error:
            why = in_words(error)
        else:
            if over():
                return
        words = f"the thread {name} ended unexpectedly: {why}"
        with suppress(Exception):
            print(words, file=sys.stderr, flush=True)
        lost(words)

    thread = threading.Thread(target=living, name=name, daemon=True)
    thread.start()
    return thread
