"""The curves of the panels, from `metrics.jsonl` in the run folder. Does not import matplotlib."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from whet.data.files import read_metrics

USUAL = (
    ("evaluation/*/reward",),
    ("reward/mean", "*/reward/mean"),
    ("response_length/mean", "evaluation/*/response_length"),
    ("loss", "validation/loss"),
)
"""Default panels."""
SMOOTHED_FROM = 40
"""A curve with at least this many points also gets a running mean."""

LARGEST = 1e30
"""Larger numbers are left out, as are numbers that are not finite: on their axis no other value would be visible."""


@frozen(eq=False)
class Series:
    """One curve."""

    name: str
    steps: NDArray[np.int64]  # [points], ascending
    values: NDArray[np.float64]  # [points], finite
    band: NDArray[np.float64] | None = None  # [points, 2], the 95 % interval
    sparse: bool = False
    """Whether the curve is of an evaluation or validation: it has few points, and they are marked."""


@frozen
class Panel:
    """The curves that share axes."""

    title: str
    series: tuple[Series, ...]


def read_rows(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step. The last line of a step wins; unreadable lines are left out."""
    rows: dict[int, dict[str, float]] = {}
    for step, numbers in read_metrics(path):
        rows.setdefault(step, {}).update(numbers)
    return dict(sorted(rows.items()))


def panels(rows: dict[int, dict[str, float]], patterns: Sequence[Sequence[str]] = ()) -> list[Panel]:
    """Return the panels with their curves. A panel without curves is left out."""
    names = sorted({name for row in rows.values() for name in row if not name.endswith(("/ci_low", "/ci_high"))})
    # With rollouts the value of the loss says little, so it is drawn for offline training only.
    offline = not any(name.startswith("reward/") for name in names)
    wanted = patterns or [p for p in USUAL if offline or p[0] != "loss"]
    found = []
    for panel in wanted:
        chosen = list(dict.fromkeys(n for pattern in panel for n in names if fnmatchcase(n, pattern)))
        series = tuple(s for s in (_series(rows, name) for name in chosen) if len(s.steps))
        if series:
            found.append(Panel(_title(panel), series))
    return found


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running mean over the nearest points: a twentieth of all, at least five. values [points] -> [points].

    Near the ends the window shrinks equally on both sides, so that a trend is not flattened there.
    """
    index = np.arange(len(values))
    reach = np.minimum(max(len(values) // 40, 2), np.minimum(index, index[::-1]))
    windows = zip(index - reach, index + reach + 1, strict=True)
    return np.array([values[left:right].mean() for left, right in windows])  # sums of all points would cancel


def _series(rows: dict[int, dict[str, float]], name: str) -> Series:
    points = [(step, row) for step, row in rows.items() if abs(row.get(name, math.nan)) < LARGEST]
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([row[name] for _, row in points], np.float64)
    sparse = name.startswith(("evaluation/", "validation/"))
    ends = [f"{name}/ci_low", f"{name}/ci_high"]
    known = points and all(abs(row.get(end, math.nan)) < LARGEST for _, row in points for end in ends)
    band = np.array([[row[end] for end in ends] for _, row in points], np.float64) if known else None
    return Series(name, steps, values, band, sparse)


def _title(patterns: Sequence[str]) -> str:
    titles = {"evaluation/*/reward": "evaluation reward", "reward/mean": "training reward"}
    titles |= {"response_length/mean": "response length [tokens]", "loss": "loss"}
    return titles.get(patterns[0], ", ".join(patterns))
