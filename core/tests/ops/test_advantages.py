import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.ops.advantages import group_mean


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
