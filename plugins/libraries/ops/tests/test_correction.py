"""Weights, masks and the guard, worked by hand and against the formulas of the field in float64."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.correction import gap, importance_weights, trusted, within

LENGTHS = np.array([3, 2])
MASK = np.array([False, True, True, True, True])
GAPS = np.array([0.0, math.log(4), math.log(0.5), math.log(0.25), 0.0], np.float32)


def test_the_gap_is_in_nats_and_0_under_the_mask() -> None:
    found = gap(np.array([-9.0, -1.0, -np.inf]), np.array([-1.0, -1.5, -np.inf]), np.array([False, True, True]))
    assert found.tolist() == [0.0, 0.5, 0.0]


def test_weights_of_tokens_are_truncated() -> None:
    assert importance_weights(GAPS, LENGTHS, "token", 0.0, 2.0).tolist() == pytest.approx([1, 2, 0.5, 0.25, 1])
    assert importance_weights(GAPS, LENGTHS, "token", 0.5, 9.0).tolist() == pytest.approx([1, 4, 0.5, 0.5, 1])


def test_weights_of_sequences_are_products() -> None:
    assert importance_weights(GAPS, LENGTHS, "sequence", 0.0, 9.0).tolist() == pytest.approx([2, 0.25])
    assert importance_weights(GAPS, LENGTHS, "none").tolist() == [1, 1]


def test_tokens_stay_between_both_bounds() -> None:
    assert within(GAPS, LENGTHS, MASK, "token", 0.5, 2.0).tolist() == [True, False, True, False, True]


def test_sequences_stay_by_the_geometric_mean_over_trained_tokens() -> None:
    # sqrt(4 * .5) = 1.41, sqrt(.25 * 1) = .5
    assert within(GAPS, LENGTHS, MASK, "sequence", 0.9, 1.5).tolist() == [True, False]
    assert within(GAPS, LENGTHS, MASK, "sequence", 0.4, 1.4).tolist() == [False, True]


def test_sequences_stay_by_the_product_too() -> None:
    # 4 * .5 = 2, .25 * 1 = .25
    assert within(GAPS, LENGTHS, MASK, "product", 0.0, 1.9).tolist() == [False, True]
    assert within(GAPS, LENGTHS, MASK, "product", 0.3, 2.1).tolist() == [True, False]


def test_the_guard_looks_at_the_worst_token_and_at_the_mean() -> None:
    assert trusted(GAPS, LENGTHS, MASK).tolist() == [True, True]
    assert trusted(GAPS, LENGTHS, MASK, max_token=1.385).tolist() == [False, False]
    assert trusted(GAPS, LENGTHS, MASK, max_token=1.387).tolist() == [True, True]
    assert trusted(GAPS, LENGTHS, MASK, max_mean=0.8).tolist() == [False, True]  # 1.04 and 0.69


rows = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5)


@given(rows=rows, cap=st.floats(1, 5), low=st.floats(0.1, 0.9))
def test_they_are_the_formulas_of_the_field(rows: list[list[float]], cap: float, low: float) -> None:
    lengths, gaps = np.array([len(row) for row in rows]), np.array([x for row in rows for x in row], np.float64)
    mask = np.ones(len(gaps), bool)

    def each(function: Any) -> list[float]:
        return [function(row) for row in rows]

    tokens = [min(math.exp(x), cap) for row in rows for x in row]
    np.testing.assert_allclose(importance_weights(gaps, lengths, "token", 0, cap), tokens, rtol=1e-6)
    products = each(lambda row: min(math.exp(sum(row)), cap))
    np.testing.assert_allclose(importance_weights(gaps, lengths, "sequence", 0, cap), products, rtol=1e-6)
    inside = each(lambda row: low <= math.exp(math.fsum(row) / len(row)) <= cap)
    edge = each(lambda row: min(abs(math.fsum(row) / len(row) - math.log(b)) for b in (low, cap)) < 1e-9)
    found = within(gaps, lengths, mask, "sequence", low, cap)
    assert all(f == i for f, i, e in zip(found, inside, edge, strict=True) if not e)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("size", [-50.0, 50.0])
def test_extreme_gaps_are_finite(level: Any, size: float) -> None:
    gaps = gap(np.full(4, -1.0 + min(size, 0)), np.full(4, -1.0 - max(size, 0)), np.ones(4, bool))
    lengths = np.array([3, 1])
    assert np.isfinite(importance_weights(gaps, lengths, level, 0, np.inf)).all()
    assert not within(gaps, lengths, np.ones(4, bool), level, 0.5, 2.0).any()


def test_an_empty_mask_is_trusted() -> None:
    nothing = np.zeros(5, bool)
    gaps = gap(GAPS, GAPS * 0, nothing)
    assert importance_weights(gaps, LENGTHS, "sequence").tolist() == [1, 1]
    assert within(gaps, LENGTHS, nothing, "sequence", 0.5, 2).all()
    assert trusted(gaps, LENGTHS, nothing, 0.1, 0.1).all()


def test_log_ratios_are_added_up_before_they_are_clamped() -> None:
    """Two tokens that are 29 and -27 nats away are 2 nats together, and 1 on average."""
    far = gap(np.array([-1.0, -28.0]), np.array([-30.0, -1.0]), np.array([True, True]))
    lengths, mask = np.array([2]), np.array([True, True])
    assert importance_weights(far, lengths, "sequence", 0.0, 99.0).tolist() == pytest.approx([math.exp(2)], rel=1e-5)
    assert importance_weights(far, lengths, "token", 0.0, math.inf).tolist() == pytest.approx(
        [math.exp(20), math.exp(-20)], rel=1e-5
    )
    assert within(far, lengths, mask, "product", 7.3, 7.4).tolist() == [True]
    assert within(far, lengths, mask, "sequence", 2.7, 2.8).tolist() == [True]
    assert trusted(far, lengths, mask, max_token=28.0).tolist() == [False]
    assert trusted(far, lengths, mask, max_mean=28.1).tolist() == [True]
    assert trusted(far, lengths, mask, max_mean=27.9).tolist() == [False]


def test_tokens_that_one_of_the_two_cannot_produce_leave_numbers() -> None:
    far = gap(np.array([-np.inf, -1.0]), np.array([-1.0, -np.inf]), np.array([True, True]))
    lengths, mask = np.array([2]), np.array([True, True])
    assert np.isfinite(far).all()
    assert importance_weights(far, lengths, "sequence").tolist() == [1.0]
    for measure in ("ratio", "k2", "k3"):
        for level in ("token", "sequence", "product", "worst"):
            assert within(far, lengths, mask, level, 0.0, 9e9, measure).dtype == bool  # type: ignore[arg-type]
    assert trusted(far, lengths, mask, max_mean_error=1e9).tolist() == [False]
