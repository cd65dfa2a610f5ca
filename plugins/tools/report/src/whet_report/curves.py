"""The curve of each metric over steps, in so few points that a page can hold hundreds of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.data.files import metrics_of

LARGEST = 1e300
"""A larger number counts as not finite: sums and differences of such numbers are not finite."""
MOST_POINTS = 400
"""Points of one curve. A longer one becomes means of stretches, with the smallest and largest value of each."""

Metrics = dict[int, dict[str, float]]


def metrics(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the metrics in rows of `metrics.jsonl` by step, ascending; the last row of a step wins."""
    found: Metrics = {}
    for step, numbers in metrics_of(rows):
        limited = {name: v if abs(v) <= LARGEST else math.copysign(math.inf, v) for name, v in numbers.items()}
        found.setdefault(step, {}).update(limited)
    return dict(sorted(found.items()))


def curves(rows: Metrics) -> dict[str, dict[str, Any]]:
    """Return each metric as `x` (steps) and `y`.

    Long ones also have `low` and `high` of the steps of each point, and `ends`: the first and the last value.

    Values that are not finite are left out and counted in `lost`.
    """
    points: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in rows.items():
        for name, value in row.items():
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return {name: curve(*found) for name, found in sorted(points.items())}


def curve(steps: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return one curve; see `curves`."""
    x, y = np.array(steps, np.int64), np.array(values, np.float64)
    fine = np.isfinite(y)
    made: dict[str, Any] = {} if fine.all() else {"lost": int((~fine).sum())}
    x, y = x[fine], y[fine]
    if len(x) <= MOST_POINTS:
        return {"x": x.tolist(), "y": rounded(y), **made}
    begins = np.linspace(0, len(x), MOST_POINTS + 1).astype(int)
    lengths = np.diff(begins)
    return {
        "x": x[begins[1:] - 1].tolist(),
        "y": rounded(np.add.reduceat(y / np.repeat(lengths, lengths), begins[:-1])),
        "low": rounded(np.minimum.reduceat(y, begins[:-1])),
        "high": rounded(np.maximum.reduceat(y, begins[:-1])),
        "ends": rounded(y[[0, -1]]),
        **made,
    }


def rounded(values: Any) -> list[float]:
    """Return numbers to six significant digits, which is more than a chart shows."""
    return [float(f"{value:.6g}") for value in values]
