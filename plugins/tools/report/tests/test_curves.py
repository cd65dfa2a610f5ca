"""Curves keep their extremes however long they are."""

import math

import pytest

from whet_report.curves import MOST_POINTS, curve, curves, metrics


def test_short_curves_are_kept_as_they_are():
    assert curve([1, 3], [0.5, 1 / 3]) == {"x": [1, 3], "y": [0.5, 0.333333]}


def test_long_curves_become_means_that_keep_smallest_and_largest():
    values = [math.sin(step) for step in range(10_000)]
    values[4321] = 99.0
    made = curve(range(10_000), values)
    assert len(made["x"]) == len(made["y"]) == MOST_POINTS
    assert max(made["high"]) == 99.0
    assert all(low <= y <= high for low, y, high in zip(made["low"], made["y"], made["high"], strict=True))
    mean = sum(values) / len(values)
    assert abs(sum(made["y"]) / MOST_POINTS - mean) < 1e-4  # 25 steps to each point
    assert made["x"][-1] == 9_999
    assert made["ends"] == [0.0, float(f"{values[-1]:.6g}")]


@pytest.mark.parametrize("count", [400, 401, 799, 800, 1000])
def test_every_value_goes_into_one_point_whatever_their_number(count):
    made = curve(range(count), [0.0] * (count - 1) + [1.0])
    assert len(made["x"]) == min(count, MOST_POINTS)
    assert made["x"][-1] == count - 1
    assert sorted(set(made["x"])) == made["x"]
    assert [high for high in made.get("high", made["y"]) if high] == [1.0]


def test_numbers_that_are_too_large_for_a_chart_count_as_not_finite():
    rows = [{"step": 1, "loss": 10**400}, {"step": 2, "loss": -(10**400)}, {"step": 3, "loss": 1.7e308}]
    rows += [{"step": 4, "loss": "nan", "time": 10**400}, {"step": 5, "loss": 0.5, "lr": 10**400}, {"step": 10**400}]
    assert curves(metrics(rows)) == {"loss": {"x": [5], "y": [0.5], "lost": 3}, "lr": {"x": [], "y": [], "lost": 1}}


def test_values_that_are_not_finite_are_counted():
    rows = {1: {"loss": 1.0}, 2: {"loss": math.nan}, 3: {"loss": math.inf, "lr": 0.1}}
    assert curves(rows) == {"loss": {"x": [1], "y": [1.0], "lost": 2}, "lr": {"x": [3], "y": [0.1]}}
