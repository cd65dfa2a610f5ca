"""Where the time of each step went, from the spans of its phases.

The driver goes through its phases one after another, and the generator may work beside it. So that a step's parts add
up to its wall time, each instant is counted once: for the innermost phase of the driver, else for the generator, else
as `other`.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import frozen

from whet.report.curves import rounded

MOST_BARS = 160
"""Bars of the chart; of a longer run each is the mean of several steps."""
DETAILED_STEPS = 24
"""Steps whose spans are kept one by one."""
MOST_SPANS = 300
"""Spans kept of one step: the longest."""
BESIDE = "generator"
"""The role that works beside the driver."""


@frozen
class Phase:
    """One span."""

    role: str
    name: str
    begin: float
    end: float
    step: int


@frozen
class Window:
    """A step's share of the wall clock, from its first phase to the writing of its metrics."""

    step: int
    begin: float
    end: float


def phases(rows: Iterable[Mapping[str, Any]]) -> list[Phase]:
    """Read spans; rows that are none are left out. Ascending by begin."""
    found = []
    for row in rows:
        begin, seconds, step = row.get("begin"), row.get("seconds"), row.get("step")
        if isinstance(begin, int | float) and isinstance(seconds, int | float) and isinstance(step, int):
            found.append(Phase(str(row.get("role")), str(row.get("phase")), begin, begin + seconds, step))
    return sorted(found, key=lambda phase: phase.begin)


def windows(metrics: Iterable[Mapping[str, Any]], spans: Sequence[Phase]) -> list[Window]:
    """Give the window of each step, of rows of `metrics.jsonl`. Windows do not overlap."""
    first: dict[int, float] = {}
    for span in spans:
        if span.role != BESIDE:
            first.setdefault(span.step, span.begin)
    made: list[Window] = []
    for row in metrics:
        step, end, seconds = row.get("step"), row.get("time"), row.get("seconds/step", 0.0)
        if not isinstance(step, int) or not isinstance(end, int | float) or not isinstance(seconds, int | float):
            continue
        begin = min(first.get(step, end), end - seconds)
        begin = max(begin, made[-1].end) if made and made[-1].end <= end else begin
        made.append(Window(step, begin, end))
    return made


def shares(window: Window, spans: Sequence[Phase]) -> dict[str, float]:
    """Give the seconds of a window that each phase took; they add up to the window."""
    inside = [s for s in spans if s.begin < window.end and s.end > window.begin]
    edges = {edge for s in inside for edge in (s.begin, s.end) if window.begin < edge < window.end}
    marks = sorted({window.begin, window.end} | edges)
    taken: dict[str, float] = defaultdict(float)
    for begin, end in pairwise(marks):
        active = [s for s in inside if s.begin <= begin and s.end >= end]
        chosen = max(active, key=lambda s: (s.role != BESIDE, s.begin), default=None)
        taken[f"{chosen.role}.{chosen.name}" if chosen else "other"] += end - begin
    return taken


def timing(metrics: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Give what the page shows of time: phases of each step stacked, and all spans of a few steps."""
    spans = phases(rows)
    begins = [span.begin for span in spans]
    longest = max((span.end - span.begin for span in spans), default=0.0)
    steps = windows(metrics, spans)

    def near(window: Window) -> Sequence[Phase]:
        return spans[bisect_left(begins, window.begin - longest) : bisect_right(begins, window.end)]

    parts = [shares(window, near(window)) for window in steps]
    total: dict[str, float] = defaultdict(float)
    for name, seconds in (item for part in parts for item in part.items()):
        total[name] += seconds
    names = sorted(total, key=lambda name: (name == "other", -total[name]))
    stretches = [s for s in np.array_split(np.arange(len(steps)), min(MOST_BARS, len(steps)) or 1) if len(s)]
    return {
        "phases": names,
        "totals": rounded(total[name] for name in names),
        "bars": [
            {
                "steps": [steps[s[0]].step, steps[s[-1]].step],
                "seconds": rounded(sum(parts[i].get(name, 0.0) for i in s) / len(s) for name in names),
            }
            for s in stretches
        ],
        "details": [_detail(steps[i], near(steps[i])) for i in _interesting(steps)],
    }


def _interesting(steps: Sequence[Window]) -> list[int]:
    """Positions of the first, the last, the slowest and a few steps in between."""
    count = len(steps)
    slowest = sorted(range(count), key=lambda i: steps[i].begin - steps[i].end)[:6]
    spread = np.linspace(0, count - 1, min(count, DETAILED_STEPS - 12)).astype(int).tolist() if count else []
    return sorted({*range(min(3, count)), *range(max(0, count - 3), count), *slowest, *spread})


def _detail(window: Window, spans: Sequence[Phase]) -> dict[str, Any]:
    inside = [s for s in spans if s.begin < window.end and s.end > window.begin]
    kept = sorted(sorted(inside, key=lambda s: s.begin - s.end)[:MOST_SPANS], key=lambda s: s.begin)
    return {
        "step": window.step,
        "seconds": round(window.end - window.begin, 6),
        "spans": [[s.role, s.name, round(s.begin - window.begin, 6), round(s.end - s.begin, 6)] for s in kept],
        "left_out": len(inside) - len(kept),
    }
