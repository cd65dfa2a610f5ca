import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.shaping import adapted_weight, cut_penalty, overlong_penalty, reward_to_go


def test_the_penalty_is_that_of_the_paper() -> None:
    # DAPO's setting scaled down: at most 20 tokens, the last 4 of which are the buffer
    found = overlong_penalty(np.array([1, 16, 17, 18, 20, 21, 900]), longest=20, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1, -1]


def test_without_a_bound_it_goes_on_falling() -> None:
    found = overlong_penalty(np.array([16, 18, 20, 21, 28]), longest=20, buffer=4, bounded=False)
    assert found.tolist() == [0, -0.5, -1, -1.25, -3]


def test_a_factor_scales_the_rewards_of_cut_responses_of_either_sign() -> None:
    rewards, cut = np.array([2.0, 2.0, -1.0, 0.0]), np.array([False, True, True, True])
    assert (rewards + cut_penalty(rewards, cut, 0.25)).tolist() == [2.0, 0.5, -0.25, 0.0]
    assert (rewards + cut_penalty(rewards, cut, 0.0)).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert not cut_penalty(rewards, cut, 1.0).any()


def test_without_a_buffer_the_bound_is_hard() -> None:
    assert overlong_penalty(np.array([9, 10, 11]), longest=10, buffer=0).tolist() == [0, 0, -1]


@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5),
    others=st.lists(st.floats(-5, 5), min_size=5, max_size=5),
)
def test_what_is_to_come_is_what_has_not_been(rows: list[list[float]], others: list[float]) -> None:
    found = reward_to_go(
        np.array(others[: len(rows)]), np.array([x for row in rows for x in row]), np.array([len(row) for row in rows])
    )
    expected = [o + sum(row[t:]) for row, o in zip(rows, others, strict=False) for t in range(len(row))]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_what_is_to_come_of_equal_rewards_is_equal_to_the_last_bit() -> None:
    rewards, costs = np.array([0.0, 0.0, 0.1]), np.array([1e6, 0.1, 0.7, -0.2, 0.3, -0.2, 0.3])
    found = reward_to_go(rewards, costs, np.array([3, 2, 2]))
    assert found[3:5].tolist() == [-0.2 + 0.3, 0.3]
    assert (found[5:] - found[3:5]).tolist() == pytest.approx([0.1, 0.1], abs=1e-16)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [(6.0, 0.2), (6.6, 0.2 * 1.0064), (60.0, 0.2 * 1.0128), (5.4, 0.2 * 0.9936), (-50.0, 0.2 * 0.9872)],
)
def test_the_weight_follows_the_divergence(divergence: float, expected: float) -> None:
    """By hand, with 640 episodes of a horizon of 10,000: errors of 0.1, and at most 0.2."""
    assert adapted_weight(0.2, divergence, 6.0, 10_000, 640) == pytest.approx(expected, rel=1e-12)


def test_the_weight_never_falls_below_0() -> None:
    assert adapted_weight(0.1, 0.0, 6.0, 20, 128) == 0.0


def test_no_sequences_have_nothing_to_come() -> None:
    assert reward_to_go(np.zeros(0), np.zeros(0), np.zeros(0, np.int64)).shape == (0,)
