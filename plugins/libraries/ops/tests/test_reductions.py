"""Each bridge against a plain loop, in NumPy and in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.reductions import expand, segment_mean, segment_sum

ragged = st.lists(st.lists(st.floats(-100, 100, width=32), max_size=5), max_size=6)
Arrays = Callable[[Any, Any], Any]


def numpy(values: Any, dtype: Any = np.float32) -> Any:
    return np.asarray(values, dtype)


def of_torch(values: Any, dtype: Any = np.float32) -> Any:
    return torch.from_numpy(np.asarray(values, dtype))


both = pytest.mark.parametrize("make", [numpy, of_torch])


@both
@given(rows=ragged)
def test_sums_are_those_of_each_sequence(make: Arrays, rows: list[list[float]]) -> None:
    flat, lengths = [value for row in rows for value in row], [len(row) for row in rows]
    found = segment_sum(make(flat, np.float32), make(lengths, np.int64))
    assert len(found) == len(rows)
    np.testing.assert_allclose(np.asarray(found), [float(sum(row)) for row in rows], rtol=1e-4, atol=1e-3)


@both
@given(rows=ragged, data=st.data())
def test_means_are_those_of_the_tokens_that_count(make: Arrays, rows: list[list[float]], data: st.DataObject) -> None:
    flat, lengths = [value for row in rows for value in row], [len(row) for row in rows]
    mask = data.draw(st.lists(st.booleans(), min_size=len(flat), max_size=len(flat)))
    counted, expected = iter(mask), []
    for row in rows:
        kept = [value for value in row if next(counted)]
        expected.append(sum(kept) / len(kept) if kept else 0.0)
    found = segment_mean(make(flat, np.float32), make(lengths, np.int64), make(mask, np.bool_))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-3)


@both
@given(rows=ragged)
def test_expanding_repeats_each_value_for_each_token(make: Arrays, rows: list[list[float]]) -> None:
    lengths = [len(row) for row in rows]
    found = expand(make(range(len(rows)), np.int64), make(lengths, np.int64))
    assert np.asarray(found).tolist() == [i for i, row in enumerate(rows) for _ in row]


@both
def test_the_dtype_is_kept(make: Arrays) -> None:
    for dtype in (np.float32, np.float64, np.int64):
        values, lengths = make([1, 2, 3], dtype), make([2, 1], np.int64)
        assert segment_sum(values, lengths).dtype == values.dtype
        assert expand(make([1, 2], dtype), lengths).dtype == values.dtype


@both
def test_a_masked_token_may_be_anything(make: Arrays) -> None:
    values, mask = make([1, np.inf, np.nan, 3], np.float32), make([1, 0, 0, 1], np.bool_)
    assert np.asarray(segment_mean(values, make([2, 2], np.int64), mask)).tolist() == [1, 3]


def test_gradients_reach_exactly_the_tokens_that_count() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    mask, lengths = torch.tensor([True, False, True, True]), torch.tensor([2, 2])
    (of_means,) = torch.autograd.grad(segment_mean(values, lengths, mask).sum(), values)
    assert of_means.tolist() == [1.0, 0.0, 0.5, 0.5]
    weights = torch.tensor([1.0, 10.0])
    (of_sums,) = torch.autograd.grad((segment_sum(values, lengths) * weights).sum(), values)
    assert of_sums.tolist() == [1.0, 1.0, 10.0, 10.0]
