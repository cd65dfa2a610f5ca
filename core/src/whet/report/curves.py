"""The curve of each metric over steps, in so few points that a page can hold hundreds of them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.run_folder import read_metrics

MOST_POINTS = 400
"""Of one curve. A longer one becomes means of stretches, with the smallest and largest value of each."""

Metrics = dict[int, dict[str, float]]


def read(file: Path) -> Metrics:
    """Read metrics by step, ascending; the last line of a step wins."""
    rows: Metrics = {}
    for step, numbers in read_metrics(file):
        rows.setdefault(step, {}).update(numbers)
    return dict(sorted(rows.items()))


def curves(rows: Metrics) -> dict[str, dict[str, Any]]:
    """Give each metric as `x` (steps) and `y`; long ones also as `low` and `high`, of the steps each point stands for.

    Values that are not finite are left out and counted in `lost`.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for step, row in rows.items():
        for name, value in row.items():
            points.setdefault(name, []).append((step, value))
    return {name: curve(found) for name, found in sorted(points.items())}


def curve(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Give one curve; see `curves`."""
    found = [(step, value) for step, value in points if math.isfinite(value)]
    made: dict[str, Any] = {"lost": len(points) - len(found)} if len(found) < len(points) else {}
    steps, values = np.array([s for s, _ in found], np.int64), np.array([v for _, v in found], np.float64)
    if len(found) <= MOST_POINTS:
        return {"x": steps.tolist(), "y": rounded(values), **made}
    parts = [part for part in np.array_split(np.arange(len(found)), MOST_POINTS) if len(part)]
    return {
        "x": [int(steps[part[-1]]) for part in parts],
        "y": rounded([values[part].mean() for part in parts]),
        "low": rounded([values[part].min() for part in parts]),
        "high": rounded([values[part].max() for part in parts]),
        **made,
    }


def rounded(values: Any) -> list[float]:
    """Give numbers to six significant digits, which is more than a chart shows."""
    return [float(f"{value:.6g}") for value in values]
