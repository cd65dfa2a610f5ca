"""The version of the weights, and the moment between two tokens of a running batch at which it may change.

    lane 0   token token token |--------- waits ---------| token token
    lane 1   token token token token |-- takes weights --| token token

Threads that decode parts of one batch meet there: the last to come does the work, and the others go on after it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from attrs import define, field

from whet.errors import WeightSyncError


@define(eq=False)
class Weights:
    """What is known of the weights in use."""

    version: int = 0
    broken: str = ""
    """Why they are a mixture that must not be used; empty: they are whole."""
    _running: bool = False
    _lanes: int = 0
    _standing: int = 0
    _work: "tuple[Callable[[], None], Future[None]] | None" = None
    _changed: threading.Condition = field(factory=threading.Condition)

    def begin(self) -> None:
        """A batch is about to be decoded; `end` follows for certain."""
        self._running = True

    def end(self) -> None:
        """The batch is over; what was to happen between its tokens happens now."""
        with self._changed:
            self._running = False
            self._do()

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Decode a part of the batch on this thread."""
        with self._changed:
            self._lanes += 1
        try:
            yield
        finally:
            with self._changed:
                self._lanes -= 1
                if self._lanes and self._standing == self._lanes:
                    self._do()

    def between_tokens(self) -> int:
        """Let new weights in if there are any, and give the version of the next token. Raises `WeightSyncError`."""
        if self._work is not None:
            with self._changed:
                self._meet()
        if self.broken:
            raise WeightSyncError(f"the generator has no weights to use, as the last hand-over failed: {self.broken}")
        return self.version

    def in_running_batch(self, work: Callable[[], None]) -> "Future[None] | None":
        """Have work done between two tokens of the batch that runs; None where none does, or it has some already."""
        with self._changed:
            if not self._running or self._work is not None:
                return None
            self._work = work, Future()
            return self._work[1]

    def _meet(self) -> None:
        work = self._work
        if work is None:
            return
        self._standing += 1
        if self._standing == self._lanes:
            self._do()
        while self._work is work:
            self._changed.wait()
        self._standing -= 1

    def _do(self) -> None:
        if self._work is None:
            return
        work, future = self._work
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # it belongs to whoever asked for the work
            future.set_exception(error)
        self._work = None
        self._changed.notify_all()
