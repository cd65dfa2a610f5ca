"""Against hand-worked numbers, and against the recursion written once more, sequence by sequence in plain Python."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.gae import adaptive_lambda, at_last, explained_variance, gae


def naive(rewards, values, mask, lengths, gamma, lambdas, after):
    """The recursion of Schulman et al. 2015 over the tokens under the mask, one at a time from the back."""
    found, start = [0.0] * len(mask), 0
    for length, lambda_, last in zip(lengths, lambdas, after, strict=True):
        advantage, following = 0.0, last
        for t in reversed(range(start, start + length)):
            if mask[t]:
                delta = float(rewards[t]) + gamma * following - float(values[t])
                advantage = delta + gamma * lambda_ * advantage
                found[t], following = advantage, float(values[t])
        start += length
    return np.array(found)


def random_case(seed, lengths):
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    rewards, values = rng.normal(size=(2, tokens)).astype(np.float32)
    return rewards, values, rng.random(tokens) < 0.7, np.array(lengths, np.int64), rng.normal(size=len(lengths))


def test_hand_worked_numbers():
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.8])
    found = gae(rewards, values, np.ones(3, bool), np.array([3]), gamma=0.9, lambda_=0.5)
    deltas = [0.9 * 0.6 - 0.5, 0.9 * 0.8 - 0.6, 1 - 0.8]  # 0.04, 0.12, 0.2
    assert found == pytest.approx([0.04 + 0.45 * (0.12 + 0.45 * 0.2), 0.12 + 0.45 * 0.2, 0.2])
    assert deltas == pytest.approx([0.04, 0.12, 0.2])


def test_turns_of_an_environment_are_no_steps():
    """prompt, a0, a1, environment, environment, a2: the same as a0, a1, a2 in a row, whatever stands between."""
    mask = np.array([False, True, True, False, False, True])
    rewards, values = np.array([9, 0.1, 0.2, np.nan, 7, 1.0]), np.array([5, 0.5, 0.6, np.inf, -3, 0.8])
    found = gae(rewards, values, mask, np.array([6]), gamma=0.9, lambda_=0.5)
    alone = gae(rewards[mask], values[mask], np.ones(3, bool), np.array([3]), gamma=0.9, lambda_=0.5)
    assert found[mask].tolist() == alone.tolist()
    assert not found[~mask].any()


def test_what_comes_after_stands_in_for_the_future():
    ones, lengths = np.ones(4, bool), np.array([2, 2])
    found = gae(np.zeros(4), np.zeros(4), ones, lengths, gamma=0.5, lambda_=1.0, after=np.array([8.0, 0.0]))
    assert found.tolist() == [2.0, 4.0, 0.0, 0.0]


@given(st.lists(st.integers(0, 9), max_size=8), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_it_is_the_recursion(lengths, gamma, lambda_, seed):
    rewards, values, mask, lengths, after = random_case(seed, lengths)
    lambdas = np.linspace(0, 1, len(lengths)) * lambda_
    found = gae(rewards, values, mask, lengths, gamma=gamma, lambda_=lambdas, after=after)
    np.testing.assert_allclose(found, naive(rewards, values, mask, lengths, gamma, lambdas, after), atol=1e-12)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_with_lambda_1_the_return_is_the_sum_of_what_came_and_with_0_one_step_counts(lengths, seed):
    rewards, values, mask, lengths, _ = random_case(seed, lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for i in range(len(lengths)):
        mine = (owner == i) & mask
        to_come = np.cumsum(rewards[mine][::-1].astype(np.float64))[::-1]
        returns = (gae(rewards, values, mask, lengths, lambda_=1.0) + values)[mine]
        np.testing.assert_allclose(returns, to_come, atol=1e-5)
        next_values = np.append(values[mine].astype(np.float64), 0.0)[1:]
        one_step = gae(rewards, values, mask, lengths, lambda_=0.0)[mine]
        np.testing.assert_allclose(one_step, rewards[mine] + next_values - values[mine], atol=1e-6)


def test_neither_order_nor_neighbours_matter():
    rewards, values, mask, lengths, after = random_case(3, [4, 0, 7, 2])
    whole = gae(rewards, values, mask, lengths, gamma=0.9, after=after)
    ends = np.cumsum(lengths)
    for i, end in enumerate(ends):
        one = slice(end - lengths[i], end)
        alone = gae(rewards[one], values[one], mask[one], lengths[i : i + 1], gamma=0.9, after=after[i : i + 1])
        assert alone.tolist() == whole[one].tolist()


@pytest.mark.parametrize("lengths", [[], [0], [3], [1, 1]])
def test_nothing_to_learn_gives_nothing(lengths):
    tokens = sum(lengths)
    found = gae(np.ones(tokens), np.ones(tokens), np.zeros(tokens, bool), np.array(lengths, np.int64))
    assert found.tolist() == [0.0] * tokens


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"of 3 tokens, found \(2,\), \(3,\) and \(3,\)"):
        gae(np.ones(2), np.ones(3), np.ones(3, bool), np.array([3]))


def test_a_million_tokens_take_no_time():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, 2000)
    tokens = int(lengths.sum())
    began = time.process_time()
    gae(rng.normal(size=tokens), rng.normal(size=tokens), rng.random(tokens) < 0.9, lengths)
    assert time.process_time() - began < 5.0


def test_lambda_by_length():
    found = adaptive_lambda(np.array([0, 1, 19, 20, 40, 400]), 0.05)
    assert found == pytest.approx([0, 0, 0, 0, 0.5, 0.95])


def test_a_reward_stands_at_the_last_token_of_the_model():
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 1], bool)
    found = at_last(np.array([2.0, 3.0, 4.0, 5.0]), mask, np.array([4, 2, 0, 2]))
    assert found.tolist() == [0, 0, 2, 0, 0, 0, 0, 5]
    assert at_last(np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64)).tolist() == []


def test_explained_variance():
    actual = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(actual, actual) == 1.0
    assert explained_variance(actual + 5, actual) == 1.0
    assert explained_variance(np.full(4, 1.5), actual) == 0.0
    assert explained_variance(-actual, actual) == -3.0
    assert explained_variance(actual, np.ones(4)) == 0.0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0.0
