"""The answers of several ranks to one call."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from whet.errors import WorkerError, WorkerLost

_PATIENCE_FOR_A_DEATH = 1.0


class Gathering:
    """A call under way on several ranks: done when all have answered or one has failed."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._future: Future[list[Any]] = Future()
        self._death: Future[WorkerLost | None] = Future()
        """Of a rank that did not raise but was lost; None: all ranks have answered, and none was."""

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's answer; what comes after a failure is dropped, but for a death."""
        with self._lock:
            self._results[rank] = result
            self._missing -= 1
            if not self._death.done():
                if isinstance(error, WorkerLost):
                    self._death.set_result(error)
                elif not self._missing:
                    self._death.set_result(None)
            if self._future.done():
                return
            if error is not None:
                self._future.set_exception(error)
            elif not self._missing:
                self._future.set_result(self._results)

    def result(self) -> list[Any]:
        """Wait for the results, in rank order; raises `WorkerError`.

        Where a rank dies, those that talk to it raise, often before its death is known here: it is the one to blame.
        """
        try:
            return self._future.result()
        except WorkerError as raised:
            death = None
            if not isinstance(raised, WorkerLost):
                with suppress(TimeoutError):
                    death = self._death.result(_PATIENCE_FOR_A_DEATH)
            if death is None:
                raise
            raise death from raised

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()


class Answers:
    """A call under way on several ranks, each of which stands or falls by itself."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._missing = set(ranks)
        self._awaited: set[int] = set()
        self._results: dict[int, Any] = {}
        self._errors: dict[int, WorkerError] = {}
        self._heeding: dict[int, list[Callable[[WorkerError | None], None]]] = {}
        self._changed = threading.Condition()

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's answer, or why there is none; the first one counts."""
        with self._changed:
            if rank not in self._missing:
                return
            if error is None:
                self._results[rank] = result
            else:
                self._errors[rank] = error
            self._missing.discard(rank)
            if self._errors or not self._missing or rank in self._awaited:
                self._changed.notify_all()
            heeding = self._heeding.pop(rank, ())
        for call in heeding:
            call(error)

    def when(self, rank: int, call: Callable[[WorkerError | None], None]) -> bool:
        """Call this once a rank has answered, or with why it has not; False: that was before, or it was not asked.

        It is called by threads that serve all calls, so it may not wait.
        """
        with self._changed:
            if rank in self._missing:
                self._heeding.setdefault(rank, []).append(call)
                return True
            return False

    def result(self, rank: int) -> Any:
        """Wait for that of a rank; raises `WorkerError`."""
        if rank in self._missing:
            with self._changed:
                self._awaited.add(rank)
                self._changed.wait_for(lambda: rank not in self._missing)
                self._awaited.discard(rank)
        if rank in self._errors:
            raise self._errors[rank]
        return self._results[rank]

    def wait(self) -> None:
        """Wait until all have answered, or one has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._errors or not self._missing)

    def done(self) -> bool:
        """Whether `result` would return at once for every rank."""
        return not self._missing
