"""Work that goes on while the run takes steps: at most one at a time, whose error is raised on the driver's thread.

start ── thread "whet save" ──────────> done or failed
  └── step ── check ── step ── check ──────┴── wait        check and wait raise what failed
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future


class Background:
    """Runs one function at a time on a thread of its own."""

    def __init__(self) -> None:
        self._running: Future[None] | None = None
        self.longest = 0.0
        """Seconds of the longest work that has been done, counted from the `since` of `start`."""

    @property
    def busy(self) -> bool:
        """Return whether there is work under way."""
        return self._running is not None and not self._running.done()

    def start(self, work: Callable[[], None], since: float) -> None:
        """Begin the work, after the work before. `since`: when the work as a whole began, by `time.perf_counter`."""
        self.wait()
        running = self._running = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # is raised by `check` or `wait`
                running.set_exception(error)
            else:
                self.longest = max(self.longest, time.perf_counter() - since)
                running.set_result(None)

        # A daemon: a run that ends without waiting does not wait for this thread.
        threading.Thread(target=run, name="whet save", daemon=True).start()

    def check(self) -> None:
        """Raise the error of work that has failed, once."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done. Raises its error, once."""
        if self._running is not None:
            error = self._running.exception()
            self._running = None
            if error is not None:
                raise error
