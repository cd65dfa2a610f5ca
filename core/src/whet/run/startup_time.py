"""Measures the time from the start of a run attempt to the end of its first step, and the parts of this time."""

import os
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import define, field

from whet.data.spans import Span

TOTAL = "seconds/startup"
"""The metric of the whole time; its parts are `seconds/startup.PART`."""
BEFORE = frozenset({"load plugins", "config", "prepare", "import", "start", "load", "tokenise"})
"""Phases that come before the first step and are no part of it."""
_OUTERMOST = BEFORE | {"weight_sync", "probe", "evaluate", "score", "sleep", "wake"}
"""Phases before the first step. If one phase contains another, the inner one counts."""


@define
class Startup:
    """Adds up what happened before the first step, and that step, from `began` on.

    If several phases run at the same moment, the moment counts for the phase that ends first. So each other phase
    counts only the time by which it takes longer.
    """

    began: float
    """Seconds since the epoch."""
    _spans: list[Span] = field(factory=list, init=False)
    _over: bool = field(default=False, init=False)

    def metrics(self, spans: Iterable[Span], step_seconds: float, first: bool) -> dict[str, float]:
        """Add the spans of a record. Return the metrics with the first step, and none with any other record."""
        if self._over:
            return {}
        step_began = time.time() - step_seconds
        self._spans += [s for s in spans if s.phase in _OUTERMOST and not (first and s.begin >= step_began)]
        if not first:
            return {}
        self._over = True
        total = time.time() - self.began
        parts = {**_shares(self._spans), "first step": step_seconds}
        parts["other"] = max(0.0, total - sum(parts.values()))
        return {TOTAL: round(total, 3), **{f"{TOTAL}.{name}": round(value, 3) for name, value in parts.items()}}


def _shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return how the time that spans cover is shared out among their phases."""
    names = [span.phase if span.role == "run" else f"{span.role}.{span.phase}" for span in spans]
    ends = [(span.begin, span.begin + span.seconds, name) for span, name in zip(spans, names, strict=True)]
    shares = dict.fromkeys((name for _, _, name in ends), 0.0)
    for left, right in pairwise(sorted({moment for begin, end, _ in ends for moment in (begin, end)})):
        under_way = [(end, name) for begin, end, name in ends if begin <= left and end >= right]
        if under_way:
            shares[min(under_way)[1]] += right - left
    return shares


def process_began() -> float:
    """Return when this process was started, in seconds since the epoch; the present if it is not known."""
    now = time.time()
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
