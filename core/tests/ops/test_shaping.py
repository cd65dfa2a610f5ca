import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.ops.shaping import overlong_penalty, rewards_to_come


def test_the_penalty_is_that_of_the_paper() -> None:
    # DAPO's setting scaled down: at most 20 tokens, the last 4 of which are the buffer
    found = overlong_penalty(np.array([1, 16, 17, 18, 20, 21, 900]), longest=20, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_without_a_bound_it_goes_on_falling() -> None:
    found = overlong_penalty(np.array([16, 18, 20, 21, 28]), longest=20, buffer=4, bounded=False)
    assert found.tolist() == [0, -0.5, -1, -1.25, -3]


def test_without_a_buffer_the_bound_is_hard() -> None:
    assert overlong_penalty(np.array([9, 10, 11]), longest=10, buffer=0).tolist() == [0, 0, -1]


@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5),
    others=st.lists(st.floats(-5, 5), min_size=5, max_size=5),
)
def test_what_is_to_come_is_what_has_not_been(rows: list[list[float]], others: list[float]) -> None:
    totals = np.array([other + sum(row) for row, other in zip(rows, others, strict=False)])
    found = rewards_to_come(totals, np.array([x for row in rows for x in row]), np.array([len(row) for row in rows]))
    expected = [o + sum(row[t:]) for row, o in zip(rows, others, strict=False) for t in range(len(row))]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_no_sequences_have_nothing_to_come() -> None:
    assert rewards_to_come(np.zeros(0), np.zeros(0), np.zeros(0, np.int64)).shape == (0,)
