"""Phase spans: which role was busy with what, and when. Handles record them; algorithms hold no timing code."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from attrs import define, field, frozen


@frozen
class Span:
    """One phase of one role, or the part of it within one step."""

    role: str
    phase: str
    begin: float
    """Seconds since the epoch."""
    seconds: float


@define(eq=False)
class Phase:
    """A running phase."""

    role: str
    phase: str
    since: float
    """When it began, in seconds of `time.perf_counter`."""
    _begin: float
    """When its next span begins, in seconds since the epoch."""
    _clock: float
    """The same moment, in seconds of `time.perf_counter`."""

    def cut(self) -> Span:
        """Return the span up to now, and begin another."""
        now, begin = time.perf_counter(), self._begin
        seconds = now - self._clock
        self._begin, self._clock = begin + seconds, now
        return Span(self.role, self.phase, begin, seconds)


@frozen
class Spans:
    """Collects spans from any thread until they are drained, which happens once per step.

    A phase that is running at that moment is cut in two, so that a step has only the seconds that passed within it.
    """

    _spans: list[Span] = field(factory=list, init=False)
    _open: list[Phase] = field(factory=list, init=False)
    _longest: dict[tuple[str, str], float] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def under_way(self) -> list[Phase]:
        """Return the phases that have begun and not ended."""
        with self._lock:
            return list(self._open)

    def longest(self, role: str, phase: str) -> float:
        """Return the seconds of the longest finished phase of this role and name. 0.0: none has finished."""
        with self._lock:
            return self._longest.get((role, phase), 0.0)

    @contextmanager
    def phase(self, role: str, phase: str) -> Iterator[None]:
        """Record the body as a span, even if it raises."""
        now = time.perf_counter()
        running = Phase(role, phase, now, time.time(), now)
        with self._lock:
            self._open.append(running)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(running)
                longest = max(self._longest.get((role, phase), 0.0), time.perf_counter() - running.since)
                self._longest[role, phase] = longest
                self._spans.append(running.cut())

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans that were measured elsewhere."""
        with self._lock:
            self._spans.extend(spans)

    def drain(self) -> list[Span]:
        """Return the spans recorded so far, with the parts of running phases up to now, and remove them."""
        with self._lock:
            spans = [*self._spans, *(running.cut() for running in self._open)]
            self._spans.clear()
        return spans
