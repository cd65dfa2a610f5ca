from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.rollout.routing import choose, shuffled


@given(length=st.integers(1, 400), seed=st.integers(0, 100), epoch=st.integers(0, 5))
def test_each_pass_over_the_tasks_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    walk = [shuffled(seed, "tasks", epoch * length + i, length) for i in range(length)]
    assert sorted(walk) == list(range(length))


def test_passes_seeds_and_purposes_give_different_orders() -> None:
    def order(seed: int, purpose: str, epoch: int) -> tuple[int, ...]:
        return tuple(shuffled(seed, purpose, epoch * 50 + i, 50) for i in range(50))

    orders = [order(0, "a", 0), order(0, "a", 1), order(1, "a", 0), order(0, "b", 0)]
    assert len(set(orders)) == 4
    assert order(0, "a", 0) == orders[0]


def test_neighbours_are_not_left_beside_each_other() -> None:
    walk = [shuffled(3, "tasks", i, 1000) for i in range(1000)]
    # Of a uniform permutation of n, 2 (n - 1) / n pairs are expected to stay beside each other; 12 is beyond 1e-6.
    assert sum(abs(a - b) == 1 for a, b in pairwise(walk)) < 12
    assert abs(sum(walk[:500]) / 500 - 499.5) < 60  # 6 standard errors


def test_a_task_far_into_an_endless_set_costs_nothing() -> None:
    assert 0 <= shuffled(0, "tasks", 10**15 + 7, 2**40 + 1) <= 2**40


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), steps=st.integers(0, 200))
def test_every_environment_stays_within_one_of_its_share(weights: list[int], steps: int) -> None:
    taken = [0] * len(weights)
    for _ in range(steps):
        taken[choose(weights, taken)] += 1
    for count, weight in zip(taken, weights, strict=True):
        assert abs(count - steps * weight / sum(weights)) <= 0.5 * len(weights) + 1e-9


def test_weights_3_to_1_interleave() -> None:
    taken, order = [0, 0], []
    for _ in range(8):
        order.append(choose([3.0, 1.0], taken))
        taken[order[-1]] += 1
    assert order == [0, 0, 1, 0, 0, 0, 1, 0]


def test_an_environment_of_weight_0_is_never_chosen() -> None:
    assert {choose([0.0, 1.0], [0, n]) for n in range(20)} == {1}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_smallest_sets_work(length: int) -> None:
    assert {shuffled(0, "tasks", i, length) for i in range(length)} == set(range(length))
