"""Each way to average, against the mean written out."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.aggregation import Aggregation, count, total

ragged = st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5)


def written_out(rows: list[list[tuple[float, bool]]], aggregation: Aggregation, longest: int) -> float:
    kept = [[value for value, learned in row if learned] for row in rows]
    kept = [row for row in kept if row]
    if not kept:
        return 0.0
    if aggregation == "token":
        return sum(map(sum, kept)) / sum(map(len, kept))
    if aggregation == "sequence":
        return sum(sum(row) / len(row) for row in kept) / len(kept)
    return sum(map(sum, kept)) / (len(kept) * longest)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@given(rows=ragged)
def test_a_total_over_its_count_is_the_mean(make: Any, aggregation: Any, rows: list[Any]) -> None:
    values = make([value if learned else 0.0 for row in rows for value, learned in row])
    mask = make([learned for row in rows for _, learned in row])
    lengths = make([len(row) for row in rows])
    found = float(total(values, mask, lengths, aggregation)) / max(float(count(mask, lengths, aggregation, 7)), 1)
    assert found == pytest.approx(written_out(rows, aggregation, 7), abs=1e-4)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_sequences_without_a_token_count_where_they_are_to(make: Any) -> None:
    mask, lengths = make([True, False, False, False, True, True]), make([2, 2, 0, 2])
    assert int(count(mask, lengths, "sequence")) == 2
    assert int(count(mask, lengths, "sequence", count_empty=True)) == 4
    assert int(count(mask, lengths, "constant", 5, count_empty=True)) == 20
    assert int(count(mask, lengths, "token", count_empty=True)) == 3


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 1),
        ({"count_empty": True}, 3),
        ({"count_empty": True, "count_masked": False}, 2),
        ({"count_masked": True}, 2),
    ],
)
@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_empty_and_masked_sequences_count_apart(make: Any, options: dict[str, Any], number: int) -> None:
    """One sequence is trained, one was sampled and masked, and in one nothing was sampled."""
    mask, sampled = make([False, True, False, False, False]), make([False, True, True, False, False])
    found = count(mask, make([2, 1, 2]), "sequence", sampled=sampled, **options)
    assert int(found) == number
    assert int(count(mask, make([2, 1, 2]), "constant", 7, sampled=sampled, **options)) == 7 * number


def test_without_knowing_what_was_sampled_all_that_are_left_are_empty() -> None:
    mask, lengths = np.array([True, False]), np.array([1, 1])
    assert count(mask, lengths, "sequence", count_empty=True) == 2
    assert count(mask, lengths, "sequence", count_empty=True, count_masked=False) == 2
    assert count(mask, lengths, "sequence", count_masked=True) == 1


@pytest.mark.parametrize("name", ["token", "sequence", "constant"])
def test_a_conversation_of_several_sequences_counts_as_one_sequence_with_all_its_trained_tokens(name) -> None:
    values, mask = np.array([1.0, 2, 4, 8, 16, 32, 64]), np.array([0, 1, 1, 0, 1, 1, 1], np.bool_)
    values = np.where(mask, values, 0)
    whole = total(values, mask, np.array([5, 2]), name), count(mask, np.array([5, 2]), name, 10)
    share = np.array([2 / 3, 1 / 3, 1.0])
    parts = np.array([3, 2, 2])
    cut = total(values, mask, parts, name, share), count(mask, parts, name, 10, share=share)
    np.testing.assert_allclose(cut, whole, rtol=1e-12)
    tensors = [torch.from_numpy(each) for each in (values, mask, parts, share)]
    again = total(*tensors[:3], name, tensors[3]), count(*tensors[1:3], name, 10, share=tensors[3])
    np.testing.assert_allclose([float(each) for each in again], whole, rtol=1e-12)
