"""Phase spans: who did what when. Handles record them; algorithms hold no timing code."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import field, frozen


@frozen
class Span:
    """One phase of one role."""

    role: str
    phase: str
    begin: float
    """Seconds since the epoch."""
    seconds: float


@frozen
class Spans:
    """Collects spans from any thread until they are drained, which happens once a step."""

    _spans: list[Span] = field(factory=list, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    @contextmanager
    def phase(self, role: str, phase: str) -> Iterator[None]:
        """Record what happens inside as a span; also when it raises."""
        begin, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._spans.append(Span(role, phase, begin, time.perf_counter() - clock))

    def drain(self) -> list[Span]:
        """Take what was recorded so far."""
        with self._lock:
            spans = self._spans[:]
            self._spans.clear()
        return spans
