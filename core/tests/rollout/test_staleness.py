"""Whatever ends when: no group is older than the bound, and none waits for ever."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.rollout.staleness import Order, Pacing, Slot

ORDERS = ("fifo", "as_completed")


def slots(*described: str, due: int = 9) -> list[Slot]:
    """`kept 2` is the group that was kept as the second to be through; `playing` plays."""
    made = []
    for index, text in enumerate(described):
        outcome, _, finished = text.partition(" ")
        made.append(Slot(index, 0, 0, due, outcome, finished=int(finished or 0)))  # type: ignore[arg-type]
    return made


def chosen(pacing: Pacing, waiting: list[Slot], size: int, take: int = 1) -> list[int] | None:
    found = pacing.choose(waiting, size, take)
    return None if found is None else [slot.index for slot in found]


def test_in_order_of_admission_the_oldest_are_waited_for() -> None:
    pacing = Pacing(2)
    assert chosen(pacing, slots("kept 2", "playing", "kept 1", "kept 3"), 2) is None
    assert chosen(pacing, slots("kept 2", "filtered 4", "kept 1", "playing"), 2) == [0, 2]


def test_in_order_of_completion_those_that_are_through_go_first() -> None:
    pacing = Pacing(2, "as_completed")
    assert chosen(pacing, slots("kept 3", "playing", "kept 1", "kept 2"), 2) == [2, 3]
    assert chosen(pacing, slots("kept 1", "playing", "dropped 2", "playing"), 2) is None


def test_a_group_that_is_due_is_waited_for_and_goes_before_earlier_ones() -> None:
    pacing = Pacing(2, "as_completed")
    waiting = slots("playing", "kept 1", "kept 2", "kept 3")
    waiting[0].due = 4
    assert chosen(pacing, waiting, 2, take=4) is None
    waiting[0].outcome, waiting[0].finished = "kept", 4
    assert chosen(pacing, waiting, 2, take=4) == [0, 1]


def test_groups_that_the_next_takes_have_no_room_for_go_now() -> None:
    pacing = Pacing(2, "as_completed")
    waiting = slots("kept 1", "kept 2", "kept 3", "kept 4", "kept 5")
    for slot in waiting[2:]:
        slot.due = 5  # three groups for the takes 4 and 5, of two each
    assert chosen(pacing, waiting, 2, take=4) == [0, 2]


@pytest.mark.parametrize(("staleness", "fifo", "as_completed"), [(0, 0, 0), (1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 2)])
def test_completion_prepares_half_as_many_takes(staleness: int, fifo: int, as_completed: int) -> None:
    assert Pacing(staleness).depth == fifo
    assert Pacing(staleness, "as_completed").depth == as_completed


@settings(max_examples=300)
@given(
    staleness=st.integers(0, 5),
    order=st.sampled_from(ORDERS),
    size=st.integers(1, 5),
    lost=st.sampled_from([0.0, 0.3, 0.7]),
    stuck=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_no_group_is_given_after_it_is_due_and_none_starves(
    staleness: int, order: Order, size: int, lost: float, stuck: float, seed: int
) -> None:
    """Groups end in any order, some hang as long as nothing waits for them; versions change as late as they may."""
    draw, pacing = random.Random(seed), Pacing(staleness, order)
    waiting: list[Slot] = []
    version, admitted, through = 0, 0, 0
    made_by: dict[int, int] = {}
    slow: set[int] = set()

    def admit(takes: int, taking: bool) -> None:
        nonlocal admitted
        for _ in range(pacing.room(waiting, size, taking)):
            waiting.append(Slot(admitted, 0, 0, pacing.due(takes, taking)))
            made_by[admitted] = version
            if draw.random() < stuck:
                slow.add(admitted)
            admitted += 1

    def end(slot: Slot) -> None:
        nonlocal through
        through += 1
        slot.outcome = draw.choice(["filtered", "dropped"]) if draw.random() < lost else "kept"  # type: ignore[assignment]
        slot.finished = through

    given_out = Counter[int]()
    for take in range(1, 12):
        while (found := pacing.choose(waiting, size, take)) is None:
            admit(take - 1, taking=True)
            playing = [slot for slot in waiting if slot.outcome == "playing"]
            assert playing, "it waits, and nothing plays"
            # Those that hang end last: only when all others are through and the take still waits.
            end(draw.choice([slot for slot in playing if slot.index not in slow] or playing))
        assert len(found) == size
        assert [slot.index for slot in found] == sorted(slot.index for slot in found)
        for slot in found:
            given_out[slot.index] += 1
            assert slot.due >= take
            assert take - 1 - made_by[slot.index] <= staleness
        gone = {slot.index for slot in found}
        waiting = [slot for slot in waiting if slot.counts and slot.index not in gone]
        assert all(slot.due > take for slot in waiting), "a group can no longer be given in time"
        if draw.random() < 0.5:  # before or after the weights change
            admit(take, taking=False)
            version = take
        else:
            version = take
            admit(take, taking=False)
    assert set(given_out.values()) == {1}
