"""The answers of several ranks to one call."""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from whet.errors import WorkerError, WorkerLost

_PATIENCE_FOR_A_DEATH = 1.0


class GatheredFuture:
    """A call under way on several ranks: done when all have answered or one has failed."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._future: Future[list[Any]] = Future()
        self._death: Future[WorkerLost | None] = Future()
        """The error of a rank whose process was lost; None: all ranks have answered, and no process was lost."""

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's answer. After a failure, answers are dropped, except that a process was lost."""
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
        """Wait for the results and return them in rank order. Raises `WorkerError`.

        When a rank dies, the ranks that talk to it raise, often before its death is known here. So after an error this
        waits a moment for a death, and raises that instead: the dead rank is the cause.
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
        """Return whether `result` would return or raise without waiting for answers."""
        return self._future.done()


class Answers:
    """A call under way on several ranks, whose results are independent of each other."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._missing = set(ranks)
        self._awaited: set[int] = set()
        self._results: dict[int, Any] = {}
        self._errors: dict[int, WorkerError] = {}
        self._heeding: dict[int, list[Callable[[WorkerError | None], None]]] = {}
        self._changed = threading.Condition()

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's result or its error. Only the first counts."""
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
        """Register `call` for the time when a rank has answered or failed, and return True.

        False: the rank has answered or failed already, or was not asked. `call` gets the error or None. The threads
        that serve all calls call it, so it may not wait.
        """
        with self._changed:
            if rank in self._missing:
                self._heeding.setdefault(rank, []).append(call)
                return True
            return False

    def result(self, rank: int) -> Any:
        """Wait for the result of a rank and return it. Raises `WorkerError`."""
        if rank in self._missing:
            with self._changed:
                self._awaited.add(rank)
                self._changed.wait_for(lambda: rank not in self._missing)
                self._awaited.discard(rank)
        if rank in self._errors:
            raise self._errors[rank]
        return self._results[rank]

    def wait(self) -> None:
        """Wait until all ranks have answered, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._errors or not self._missing)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once for every rank."""
        return not self._missing
