import itertools
import math
from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.data import metrics
from whet.data.metrics import (
    Metric,
    detached,
    histogram,
    histogram_rows,
    largest,
    mean,
    merge,
    plain,
    smallest,
    total,
)
from whet.runtime.wire import decode, encode

numbers = st.floats(-1e6, 1e6)
KINDS: dict[str, tuple[Callable[[float], Metric], Callable[[list[float]], float]]] = {
    "mean": (mean, lambda values: sum(values) / len(values)),
    "sum": (total, sum),
    "max": (largest, max),
    "min": (smallest, min),
}


@given(st.sampled_from(sorted(KINDS)), st.lists(numbers, min_size=1, max_size=12), st.data())
def test_merging_gives_the_same_in_any_grouping(kind: str, values: list[float], data: st.DataObject) -> None:
    make, expected = KINDS[kind]
    parts: list[Mapping[str, Metric]] = [{"x": make(value)} for value in values]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i : i + 2] = [merge(parts[i : i + 2])]
    assert parts[0]["x"].number() == pytest.approx(expected(values), abs=1e-6)


EDGES = (-1.0, 0.0, 2.5)


@given(st.lists(st.lists(numbers | st.just(math.nan), max_size=8), min_size=1, max_size=5), st.booleans())
def test_histograms_of_parts_add_up_to_that_of_the_whole(parts: list[list[float]], tensors: bool) -> None:
    arrays = [np.array(part, np.float32) for part in parts]
    merged = reduce(Metric.merge, [histogram(torch.from_numpy(a) if tensors else a, EDGES) for a in arrays])
    values = np.concatenate(arrays)
    expected = np.histogram(values[~np.isnan(values)], [-math.inf, *EDGES, math.inf])[0].tolist()
    (row,) = histogram_rows(detached({"x": merged}))
    assert row == {"name": "x", "edges": list(EDGES), "counts": expected}


def test_a_histogram_may_have_any_shape_and_dtype() -> None:
    for values in (torch.tensor([[1, 3], [0, -7]]), np.array([[1, 3], [0, -7]]), torch.tensor([0.0, 1, 3, -7]).half()):
        assert histogram_rows({"x": histogram(values, (-0.5, 0.5, 2.0))})[0]["counts"] == [1, 1, 1, 1]


def test_a_histogram_of_parameters_keeps_no_gradient() -> None:
    assert not histogram(torch.ones(3, requires_grad=True), EDGES).value.requires_grad


def test_histograms_are_no_plain_numbers() -> None:
    assert plain({"a": mean(1.0), "x": histogram(np.ones(3), EDGES)}) == {"a": 1.0}
    assert histogram(np.ones(3), EDGES).number() == 3


def test_histograms_on_different_grids_do_not_merge() -> None:
    with pytest.raises(ValueError, match="different grids"):
        histogram(np.ones(3), EDGES).merge(histogram(np.ones(3), (0.0,)))


def test_a_histogram_crosses_between_processes() -> None:
    found = detached({"x": histogram(torch.tensor([0.5, 3.0, -2.0]), EDGES)})
    (there,) = decode(encode([found]))
    assert histogram_rows(metrics.merge([there, found]))[0]["counts"] == [2, 0, 2, 2]


def test_means_weigh_by_their_counts() -> None:
    assert mean(6.0, 3.0).merge(mean(2.0, 1.0)).number() == 2.0


def test_the_mean_of_nothing_is_0() -> None:
    assert mean(0.0, 0.0).number() == 0.0
    assert mean(0.0, 0.0).merge(mean(4.0, 2.0)).number() == 2.0


def test_metrics_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(ValueError, match="kind mean with one of kind max"):
        mean(1.0).merge(largest(1.0))


def test_names_that_only_some_parts_have_are_kept() -> None:
    merged = merge([{"a": total(1)}, {"b": total(2)}, {"a": total(3)}])
    assert plain(merged) == {"a": 4.0, "b": 2.0}


def test_merging_leaves_its_parts_alone() -> None:
    parts = [{"a": total(1)}, {"a": total(2)}]
    merge(parts)
    assert [part["a"].value for part in parts] == [1, 2]


def test_merging_nothing_gives_nothing() -> None:
    assert merge([]) == {}


def test_plain_numbers_come_in_order_of_name() -> None:
    assert list(plain({"b": total(1), "a": total(1)})) == ["a", "b"]


def test_a_number_that_is_not_finite_stays_visible() -> None:
    assert math.isnan(reduce(Metric.merge, [mean(1.0), mean(math.nan), mean(2.0)]).number())


@pytest.mark.parametrize("make", [largest, smallest])
@pytest.mark.parametrize("values", [*itertools.permutations((1.0, math.nan, 2.0))])
def test_a_nan_is_kept_in_any_order(make: Callable[[float], Metric], values: tuple[float, ...]) -> None:
    assert math.isnan(reduce(Metric.merge, map(make, values)).number())


def test_tensors_become_floats() -> None:
    torch = pytest.importorskip("torch")
    loss = torch.tensor(3.0, requires_grad=True) * 2
    found = metrics.detached({"loss": mean(loss.detach(), torch.tensor(4))})["loss"]
    assert (type(found.value), type(found.count)) == (float, float)
    assert found.number() == 1.5
