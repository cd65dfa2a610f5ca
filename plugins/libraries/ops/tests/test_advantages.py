import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.advantages import gdpo, group_mean, length_weighted, less_group_mean, pass_at_k, whiten


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_hand_worked_group() -> None:
    # rewards 1, 0, 0, 1: mean 1/2, unbiased deviation sqrt(4 * 0.25 / 3) = 0.57735
    advantages = group_mean(array(1, 0, 0, 1), np.zeros(4, np.int64))
    assert advantages == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / (0.5773502691896258 + 1e-4))
    biased = group_mean(array(1, 0, 0, 1), np.zeros(4, np.int64), unbiased=False, epsilon=0.0)
    assert biased.tolist() == [1, -1, -1, 1]
    assert group_mean(array(3, 1, 2), np.zeros(3, np.int64), scale="none").tolist() == [1, -1, 0]


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    advantages = group_mean(array(1, 2, 6), np.zeros(3, np.int64), scale="none", leave_one_out=True)
    assert advantages.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


@pytest.mark.parametrize(("rescale", "factor"), [("none", 1.0), ("unequal", 6 / 4), ("nonzero", 6 / 5)])
def test_advantages_make_up_for_samples_without_a_gradient(rescale: Any, factor: float) -> None:
    rewards, group = array(1, 0, 2, 2, 5, 3), np.array([0, 0, 1, 1, 2, 2])
    found = group_mean(rewards, group, scale="none", rescale=rescale)
    assert found == pytest.approx(np.array([0.5, -0.5, 0, 0, 1, -1]) * factor)
    nothing = group_mean(np.zeros(2), np.zeros(2, np.int64), rescale=rescale)
    assert nothing.tolist() == [0, 0]


def test_the_batchs_deviation_is_that_of_all_rewards() -> None:
    rewards = array(1, 0, 5, 3)
    advantages = group_mean(rewards, np.array([0, 0, 1, 1]), scale="batch", epsilon=0.0)
    assert advantages == pytest.approx(np.array([0.5, -0.5, 1, -1]) / np.std([1, 0, 5, 3], ddof=1))


def torch_formula(rewards: np.ndarray, size: int, epsilon: float) -> np.ndarray:
    """The published formula as TRL (epsilon 1e-4) and verl (1e-6) compute it on equally large groups."""
    grouped = torch.tensor(rewards).view(-1, size)
    scaled = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + epsilon)
    return scaled.flatten().numpy()


@given(
    rewards=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    size=st.sampled_from([2, 3, 4, 6]),
    epsilon=st.sampled_from([1e-4, 1e-6]),
)
def test_it_is_what_trl_and_verl_compute(rewards: list[int], size: int, epsilon: float) -> None:
    given_rewards, group = np.array(rewards, np.float32), np.repeat(np.arange(12 // size), size)
    found = group_mean(given_rewards, group, epsilon=epsilon)
    np.testing.assert_allclose(found, torch_formula(given_rewards, size, epsilon), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3, 0.0])
def test_equal_rewards_give_exactly_nothing(scale: str, epsilon: float, value: float) -> None:
    for size in (2, 3, 5, 7):
        rewards = np.concatenate([np.full(size, value), [value]]).astype(np.float32)
        group = np.append(np.zeros(size, np.int64), 1)
        assert not group_mean(rewards, group, scale=scale, epsilon=epsilon).any()  # type: ignore[arg-type]


def test_a_group_of_one_gets_nothing() -> None:
    found = group_mean(array(5, 1, 0), np.array([7, 3, 3]), leave_one_out=True)
    assert found[0] == 0
    assert found[1] > 0 > found[2]


def test_a_sample_alone_may_keep_its_reward() -> None:
    rewards, group = array(5, 1, 0), np.array([7, 3, 3])
    assert group_mean(rewards, group, epsilon=0.25, singleton="reward")[0] == pytest.approx(5 / 1.25)
    assert group_mean(rewards, group, scale="none", singleton="reward").tolist() == [5, 0.5, -0.5]
    by_batch = group_mean(rewards, group, scale="batch", epsilon=0.0, singleton="reward")
    assert by_batch[0] == pytest.approx(5 / np.std([5, 1, 0], ddof=1))
    assert group_mean(array(2, 2), np.array([0, 1]), scale="batch", epsilon=0.0, singleton="reward").tolist() == [0, 0]


@given(st.permutations(list(range(12))))
def test_order_and_names_of_groups_do_not_matter(order: list[int]) -> None:
    rng = np.random.default_rng(0)
    rewards, group = rng.normal(size=12).astype(np.float32), np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    found = group_mean(rewards[order], 100 - group[order])
    np.testing.assert_allclose(found, group_mean(rewards, group)[order], rtol=1e-6)


def test_shapes_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[B\] alike, found \(3,\) and \(2,\)"):
        group_mean(array(1, 2, 3), np.zeros(2, np.int64))
    assert group_mean(np.zeros(0, np.float32), np.zeros(0, np.int64)).shape == (0,)


def whitened(values: list[float], unbiased: bool) -> Any:
    """The formula of OpenRLHF and NeMo RL, or with `unbiased` of verl, in torch and float64."""
    given_values = torch.tensor(values, dtype=torch.float64)
    variance = given_values.var(unbiased=unbiased)
    return ((given_values - given_values.mean()) * variance.clamp(min=1e-8).rsqrt()).numpy()


@pytest.mark.parametrize("unbiased", [False, True])
@given(values=st.lists(st.integers(-5, 5), min_size=2, max_size=12))
def test_whitening_is_that_of_the_field(unbiased: bool, values: list[int]) -> None:
    numbers = [float(v) for v in values]
    found = whiten(np.array(numbers), np.ones(len(numbers)), unbiased=unbiased)
    np.testing.assert_allclose(found, whitened(numbers, unbiased), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("at", ["variance", "deviation"])
@given(values=st.lists(st.integers(-5, 5), min_size=2, max_size=12), epsilon=st.sampled_from([1e-8, 0.1, 3.0]))
def test_an_epsilon_may_be_added(at: Any, values: list[int], epsilon: float) -> None:
    numbers = np.array(values, float)
    found = whiten(numbers, np.ones(len(numbers)), unbiased=True, epsilon=epsilon, epsilon_at=at)
    variance = numbers.var(ddof=1)
    by = np.sqrt(variance + epsilon) if at == "variance" else np.sqrt(variance) + epsilon
    np.testing.assert_allclose(found, (numbers - numbers.mean()) / by, rtol=1e-9, atol=1e-9)


@given(values=st.lists(st.floats(-5, 5), min_size=2, max_size=6), copies=st.data())
def test_a_weight_is_as_good_as_copies(values: list[float], copies: st.DataObject) -> None:
    counts = copies.draw(st.lists(st.integers(1, 4), min_size=len(values), max_size=len(values)))
    found = whiten(np.array(values), np.array(counts, float))
    np.testing.assert_allclose(
        np.repeat(found, counts), whiten(np.repeat(values, counts), np.ones(sum(counts))), atol=1e-6
    )


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, 0.0])
def test_equal_values_whiten_to_exactly_nothing(value: float) -> None:
    assert not whiten(np.full(7, value), np.ones(7)).any()
    assert not whiten(np.array([value, 5.0]), np.array([1.0, 0.0])).any()


def test_without_weights_nothing_is_whitened() -> None:
    assert whiten(np.array([1.0, 2.0]), np.zeros(2)).tolist() == [0, 0]


def gdpo_in_torch(rewards: list[list[float]], size: int, weights: list[float]) -> Any:
    """TRL's `normalize_then_sum`, written again from its formula, in float64."""
    total = torch.zeros(len(rewards[0]), dtype=torch.float64)
    for row, weight in zip(rewards, weights, strict=True):
        grouped = torch.tensor(row, dtype=torch.float64).view(-1, size)
        total += weight * ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    return ((total - total.mean()) / (total.std() + 1e-4)).numpy()


@given(
    right=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    format_=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    weight=st.floats(0.1, 3),
)
def test_gdpo_is_what_trl_computes(right: list[int], format_: list[int], weight: float) -> None:
    named = {"right": np.array(right, np.float32), "format": np.array(format_, np.float32)}
    found = gdpo(named, np.repeat([5, 2, 9], 4), {"right": 1.0, "format": weight})
    expected = gdpo_in_torch([list(map(float, right)), list(map(float, format_))], 4, [1.0, weight])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gdpo_keeps_apart_what_a_sum_would_not() -> None:
    """The example of the paper, section 2: one reward more, and two more, are the same once the sum is normalised."""
    named, group = {"one": array(0, 1, 0, 1), "two": array(0, 0, 0, 1)}, np.repeat([0, 1], 2)
    summed = group_mean(named["one"] + named["two"], group)
    found = gdpo(named, group, {"one": 1.0, "two": 1.0})
    assert summed[1] == pytest.approx(summed[3], rel=1e-3)
    assert found[3] > 1.5 * found[1] > 0


def test_gdpo_gives_exactly_nothing_to_a_group_of_equal_rewards() -> None:
    named = {"one": array(1, 0, 0.1, 0.1), "two": array(3, 3, 7, 7)}
    found = gdpo(named, np.array([0, 0, 1, 1]), {"one": 1.0, "two": 0.5})
    assert found[2:].tolist() == [0, 0]
    assert found[0] > 0 > found[1]


def test_gdpo_leaves_out_rewards_that_are_not_there() -> None:
    named = {"one": array(1, 0, 1, 0), "two": np.array([np.nan, 1, 0, np.nan], np.float32)}
    found = gdpo(named, np.zeros(4, int), {"one": 0.0, "two": 1.0})
    assert np.isfinite(found).all()
    assert found[0] == found[3] == 0
    assert found[1] > 0 > found[2]


def test_gdpo_of_nothing_and_of_one_is_nothing() -> None:
    assert gdpo({"a": np.zeros(0)}, np.zeros(0, int), {"a": 1}).shape == (0,)
    assert gdpo({"a": np.ones(1)}, np.zeros(1, int), {"a": 1}).tolist() == [0]


def nemo_rl(rewards: list[float]) -> list[float]:
    """The estimate of NeMo RL for one group, written again from its formula: each sample against the others."""
    found = []
    for i, reward in enumerate(rewards):
        others = torch.tensor(rewards[:i] + rewards[i + 1 :], dtype=torch.float64)
        deviation = float(others.std(unbiased=False))
        found.append((reward - float(others.mean())) / (deviation + 1e-6 if deviation > 0 else 1.0))
    return found


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=7))
def test_against_the_others_it_is_what_nemo_rl_computes(rewards: list[float]) -> None:
    ours = group_mean(
        np.array(rewards), np.zeros(len(rewards), int),
        leave_one_out=True, std_over="others", unbiased=False, epsilon=1e-6,
    )  # fmt: skip
    np.testing.assert_allclose(ours, nemo_rl(rewards), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_sample_against_equal_others_is_not_divided_by_a_rounding_error(unbiased: bool) -> None:
    rewards = np.array([9999.997, 10000.007, 9999.997])
    found = group_mean(rewards, np.zeros(3, int), std_over="others", leave_one_out=True, unbiased=unbiased)
    assert found[1] == pytest.approx(0.01, rel=1e-6)
    others = np.std(rewards[1:], ddof=int(unbiased))
    assert found[0] == pytest.approx((rewards[0] - rewards[1:].mean()) / (others + 1e-4), rel=1e-6)


def test_less_group_mean_is_exactly_0_where_rewards_are_equal() -> None:
    rewards, group = np.array([0.1, 0.1, 0.1, 1.0, 4.0, 7.0]), np.array([5, 5, 5, 2, 2, 9])
    assert less_group_mean(rewards, group).tolist() == [0, 0, 0, -1.5, 1.5, 0]
    assert less_group_mean(rewards, group, "reward").tolist() == [0, 0, 0, -1.5, 1.5, 7]


def test_a_baseline_by_length_is_worked_by_hand() -> None:
    # (1 * 2 + 0 * 6) / 8 = 1/4; the second group has no token, and the plain mean
    found = length_weighted(array(1, 0, 3, 5), np.array([0, 0, 1, 1]), np.array([2, 6, 0, 0]))
    assert found.tolist() == [0.75, -0.25, -1, 1]


@given(
    rewards=st.lists(st.floats(-5, 5), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_no_other_baseline_has_less_variance(rewards: list[float], sizes: list[int]) -> None:
    """The gradients of tokens are independent, so the squared norm of a response's grows with its length."""
    lengths = np.array(sizes[: len(rewards)], np.float64)
    found = length_weighted(np.array(rewards), np.zeros(len(rewards), np.int64), lengths).astype(np.float64)

    def variance(shift: float) -> float:
        return float((lengths * (found + shift) ** 2).sum())

    assert variance(0.0) <= min(variance(0.01), variance(-0.01)) + 1e-6


@pytest.mark.parametrize("reward", [0.1, 1.0, -3.3])
def test_equal_rewards_of_different_lengths_have_no_advantage(reward: float) -> None:
    assert not length_weighted(np.full(3, reward), np.zeros(3, np.int64), np.array([1, 5, 7])).any()


@pytest.mark.parametrize("baseline", ["leave-one-out", "mean"])
@given(rewards=st.lists(st.integers(0, 3), min_size=1, max_size=6), k=st.sampled_from([None, 2, 3, 5, 9]))
def test_pass_at_k_is_the_mean_over_all_subsets(baseline: Any, rewards: list[int], k: int | None) -> None:
    values, n = np.array(rewards, np.float64) / 3, len(rewards)
    subsets = [list(one) for one in combinations(range(n), min(k or n, n))]
    best = [values[one].max() for one in subsets]
    expected = []
    for i in range(n):
        own = [one for one in subsets if i in one]
        without = [values[[j for j in one if j != i]].max() if n > 1 else values[i] for one in own]
        below = np.mean(without if baseline == "leave-one-out" else best)
        expected.append(np.mean([values[one].max() for one in own]) - below)
    deviation = np.std(best) if baseline == "mean" else np.std(values, ddof=1) if n > 1 else 0.0
    twice = np.tile(values, 2), np.repeat([7, 3], n)  # a second group changes nothing
    for scale, by in (("none", 1.0), ("group", deviation + 1e-6)):
        found = pass_at_k(*twice, k, baseline=baseline, scale=scale)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, np.tile(np.array(expected) / by, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("right", range(9))
@pytest.mark.parametrize("k", [2, 4, 8])
def test_pass_at_k_of_rights_and_wrongs_is_the_published_formula(right: int, k: int) -> None:
    n, wrong = 8, 8 - right
    reward = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(reward * (1 - reward)) or math.inf
    beside = 1 - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1) if wrong else 0.0
    expected = [(beside - reward) / deviation] * wrong + [(1 - reward) / deviation] * right
    rewards = np.repeat(np.float32([0, 1]), [wrong, right])
    found = pass_at_k(rewards, np.zeros(n), k, baseline="mean", epsilon=0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6), st.sampled_from([None, 2, 3]))
def test_pass_at_k_gives_samples_that_add_nothing_exactly_nothing(rewards: list[int], k: int | None) -> None:
    found = pass_at_k(np.array(rewards) / 7, np.zeros(len(rewards)), k)
    ordered = sorted(rewards)
    least = ordered[min(k or len(rewards), len(rewards)) - 2]  # the second best of the worst subset
    assert ((found > 0) == (np.array(rewards) > least)).all() if k else (found > 0).sum() <= 1
    assert (found >= 0).all()
