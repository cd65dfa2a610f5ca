"""Where the time of each step went, from the spans of its phases.

The driver goes through its phases one after another, and the generator may work beside it. So that a step's parts add
up to its wall time, each instant is counted once: for the innermost phase of the driver, else for the generator, else
as `other`.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen

from whet_report.curves import rounded
from whet_report.episodes import number

MOST_BARS = 160
"""Bars of the chart; of a longer run each is the mean of several steps."""
DETAILED_STEPS = 24
"""Steps whose spans are kept one by one."""
MOST_SPANS = 300
"""Spans kept of one step: the longest."""
BESIDE = "generator"
"""The role that works beside the driver."""


class Phase(NamedTuple):
    """One span. A tuple, for there are hundreds of thousands."""

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
        begin, seconds, step = number(row.get("begin")), number(row.get("seconds")), row.get("step")
        if begin is not None and seconds is not None and seconds >= 0 and isinstance(step, int):
            found.append(Phase(str(row.get("role")), str(row.get("phase")), begin, begin + seconds, step))
    return sorted(found, key=lambda phase: phase.begin)


def windows(metrics: Iterable[Mapping[str, Any]], spans: Sequence[Phase]) -> list[Window]:
    """Return the window of each step, of rows of `metrics.jsonl`. Windows do not overlap."""
    first: dict[int, float] = {}
    for span in spans:
        if span.role != BESIDE:
            first.setdefault(span.step, span.begin)
    made: list[Window] = []
    for row in metrics:
        step, end, seconds = row.get("step"), number(row.get("time")), number(row.get("seconds/step", 0.0))
        if not isinstance(step, int) or end is None or seconds is None:
            continue
        begin = min(first.get(step, end), end - max(0.0, seconds))
        begin = max(begin, made[-1].end) if made and made[-1].end <= end else begin
        made.append(Window(step, begin, end))
    return made


def inside(steps: Sequence[Window], spans: Sequence[Phase]) -> Iterator[tuple[int, list[Phase]]]:
    """Return the position of each window and the spans that reach into it, in the order in which windows begin."""
    waiting, near = iter(spans), list[Phase]()
    following = next(waiting, None)
    for position in sorted(range(len(steps)), key=lambda i: steps[i].begin):
        window = steps[position]
        near = [span for span in near if span.end > window.begin]
        while following is not None and following.begin < window.end:
            near.append(following)
            following = next(waiting, None)
        yield position, [span for span in near if span.begin < window.end and span.end > window.begin]


def shares(window: Window, spans: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds of a window that each phase took; they add up to the window. Spans ascend by begin."""
    marks = {window.begin, window.end}
    marks.update(edge for span in spans for edge in (span.begin, span.end) if window.begin < edge < window.end)
    taken: dict[str, float] = defaultdict(float)
    active: list[tuple[bool, float, int]] = []
    """Spans that have begun, by place: the one that counts first, those that are over until it is their turn."""
    begun = 0
    for begin, end in pairwise(sorted(marks)):
        while begun < len(spans) and spans[begun].begin <= begin:
            heapq.heappush(active, (spans[begun].role == BESIDE, -spans[begun].begin, begun))
            begun += 1
        while active and spans[active[0][2]].end <= begin:
            heapq.heappop(active)
        chosen = spans[active[0][2]] if active else None
        taken[f"{chosen.role}.{chosen.name}" if chosen else "other"] += end - begin
    return taken


def timing(metrics: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the page shows of time: phases of each step stacked, and all spans of a few steps."""
    spans = phases(rows)
    steps = windows(metrics, spans)
    detailed, details = set(_interesting(steps)), dict[int, dict[str, Any]]()
    parts: list[dict[str, float]] = [{} for _ in steps]
    total: dict[str, float] = defaultdict(float)
    for position, found in inside(steps, spans):
        parts[position] = shares(steps[position], found)
        if position in detailed:
            details[position] = _detail(steps[position], found)
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
        "details": [details[position] for position in sorted(details)],
    }


def _interesting(steps: Sequence[Window]) -> list[int]:
    """Return the positions of the first, the last, the slowest and a few steps in between."""
    count = len(steps)
    slowest = sorted(range(count), key=lambda i: steps[i].begin - steps[i].end)[:6]
    spread = np.linspace(0, count - 1, min(count, DETAILED_STEPS - 12)).astype(int).tolist() if count else []
    return sorted({*range(min(3, count)), *range(max(0, count - 3), count), *slowest, *spread})


def _detail(window: Window, spans: Sequence[Phase]) -> dict[str, Any]:
    kept = sorted(sorted(spans, key=lambda s: s.begin - s.end)[:MOST_SPANS], key=lambda s: s.begin)
    return {
        "step": window.step,
        "seconds": round(window.end - window.begin, 6),
        "spans": [[s.role, s.name, round(s.begin - window.begin, 6), round(s.end - s.begin, 6)] for s in kept],
        "left_out": len(spans) - len(kept),
    }
