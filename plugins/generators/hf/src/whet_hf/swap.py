"""The version of the weights, and the point between two tokens of a running batch at which it may change.

    lane 0   token token token |--------- waits ---------| token token
    lane 1   token token token token |-- takes weights --| token token

The threads (lanes) that decode parts of one batch meet at this point. The last thread to arrive takes the weights; then
all threads continue.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from attrs import define, field

from whet.errors import WeightSyncError


@define(eq=False)
class Weights:
    """The state of the weights in use."""

    version: int = 0
    broken: str = ""
    """Why the weights are a mixture and must not be used. Empty: the weights are whole."""
    _running: bool = False
    _lanes: int = 0
    _standing: int = 0
    _work: "tuple[Callable[[], None], Future[None]] | None" = None
    _changed: threading.Condition = field(factory=threading.Condition)

    def begin(self) -> None:
        """Mark that a batch starts. The caller must call `end` afterwards."""
        self._running = True

    def end(self) -> None:
        """Mark that the batch is over, and do the work that still waits for a point between two tokens."""
        with self._changed:
            self._running = False
            self._do()

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Register this thread as one that decodes a part of the batch."""
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
        """Take new weights if there are any. Returns the version for the next token. Raises `WeightSyncError`."""
        if self._work is not None:
            with self._changed:
                self._meet()
        if self.broken:
            raise WeightSyncError(f"the generator has no weights to use, as the last weight sync failed: {self.broken}")
        return self.version

    def in_running_batch(self, work: Callable[[], None]) -> "Future[None] | None":
        """Do work between two tokens of the running batch. Returns its future.

        None: no batch runs, or the batch has other work already.
        """
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
        except BaseException as error:  # raised for the caller that requested the work
            future.set_exception(error)
        self._work = None
        self._changed.notify_all()
