from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.errors import WhetError
from whet.rollout.routing import Shares, choose, shuffled, weight_at


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


def test_a_weight_lies_on_lines_between_the_points_of_its_schedule() -> None:
    schedule = {100: 0.2, 0: 1.0}
    assert [weight_at(schedule, step) for step in (0, 50, 100, 900)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert weight_at(0.5, 7) == 0.5


@given(
    points=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4),
    other=st.integers(1, 9),
    interrupted=st.integers(0, 119),
)
def test_counts_follow_a_schedule_and_go_on_after_a_checkpoint(
    points: list[tuple[int, int]], other: int, interrupted: int
) -> None:
    weights = [dict(points), other]
    shares, taken, wanted, order = Shares(weights), [0, 0], 0.0, []
    resumed = None
    for index in range(120):
        if index == interrupted:
            resumed, before = Shares(weights), list(taken)
            resumed.restore(shares.state(index, {}), before)
        order.append(shares.next(taken, index // 3))
        taken[order[-1]] += 1
        first = weight_at(weights[0], index // 3)
        wanted += first / (first + other)
        assert abs(taken[0] - wanted) <= 1.0
    assert resumed is not None
    again = []
    for index in range(interrupted, 120):
        again.append(resumed.next(before, index // 3))
        before[again[-1]] += 1
    assert again == order[interrupted:]


def test_after_a_weight_has_fallen_to_0_the_environment_rests() -> None:
    shares, taken = Shares([{0: 1, 9: 1, 10: 0}, 1]), [0, 0]
    order = []
    for step in range(30):
        order.append(shares.next(taken, step))
        taken[order[-1]] += 1
    assert sum(route == 0 for route in order[:10]) == 5
    assert set(order[10:]) == {1}


def test_a_schedule_that_leaves_no_environment_is_refused_with_the_step() -> None:
    with pytest.raises(WhetError, match="of 2 environments none has a weight above 0 after step 20"):
        Shares([{10: 1.0, 20: 0.0}, 0.0])
