"""Curves keep their extremes however long they are."""

import math

from whet.report.curves import MOST_POINTS, curve, curves


def test_short_curves_are_kept_as_they_are():
    assert curve([(1, 0.5), (3, 1 / 3)]) == {"x": [1, 3], "y": [0.5, 0.333333]}


def test_long_curves_become_means_that_keep_smallest_and_largest():
    points = [(step, math.sin(step)) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    made = curve(points)
    assert len(made["x"]) == len(made["y"]) == MOST_POINTS
    assert max(made["high"]) == 99.0
    assert all(low <= y <= high for low, y, high in zip(made["low"], made["y"], made["high"], strict=True))
    mean = sum(value for _, value in points) / len(points)
    assert abs(sum(made["y"]) / MOST_POINTS - mean) < 1e-4  # 25 steps to each point
    assert made["x"][-1] == 9_999


def test_values_that_are_not_finite_are_counted():
    rows = {1: {"loss": 1.0}, 2: {"loss": math.nan}, 3: {"loss": math.inf, "lr": 0.1}}
    assert curves(rows) == {"loss": {"x": [1], "y": [1.0], "lost": 2}, "lr": {"x": [3], "y": [0.1]}}
