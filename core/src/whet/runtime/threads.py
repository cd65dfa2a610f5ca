"""Long-lived threads: an item that raises does not end its thread, and no thread ends in silence.

    watched(name, run, lost)      start a thread; `lost` is called with words if it ends before it may
    Guard(name).item()            around one item of its work: what that raises is reported once, and the thread goes on

A thread whose items raise `MOST_IN_A_ROW` times in a row gives up, and so is lost: it would do nothing but fail.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from whet.errors import in_words, place_of

log = logging.getLogger(__name__)

MOST_IN_A_ROW = 50
PAUSE_SECONDS = 0.05
"""After an item that raised, so that a fault which stays does not take a whole core."""
MOST_REPORTS = 100


class Guard:
    """Reports what the items of a long-lived thread raise, each kind and place once, and lets the thread go on."""

    def __init__(self, thread: str, pause_seconds: float = PAUSE_SECONDS) -> None:
        self._thread, self._pause_seconds = thread, pause_seconds
        self._told = set[tuple[str, str]]()
        self._in_a_row = 0

    @contextmanager
    def item(self) -> Iterator[None]:
        """Do one item of the thread's work. Raise what it raised where so many in a row have failed."""
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
        """Log an error, unless one of its type was raised at the same place before."""
        found = (type(error).__name__, place_of(error))
        if found not in self._told and len(self._told) < MOST_REPORTS:
            self._told.add(found)
            with suppress(Exception):  # nobody may read along any more
                log.error("the thread %s goes on after an error: %s", self._thread, in_words(error))


def watched(
    name: str,
    run: Callable[[], object],
    lost: Callable[[str], object] = lambda words: None,
    over: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """Start a daemon thread. If it raises, or returns before `over()` says that it may, call `lost` with words.

    The words are printed, too. `lost` runs on the thread, as the last thing that it does.
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
