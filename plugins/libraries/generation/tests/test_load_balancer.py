"""The least load is the one that a look at all of them finds."""

import random

from whet_generation.load_balancer import LoadBalancer


def test_the_least_is_that_of_a_look_at_all_whatever_changes() -> None:
    chance, size = random.Random(7), 12
    loads, there = LoadBalancer(size), frozenset(range(size))
    for _ in range(5000):
        if chance.random() < 0.02:
            there = frozenset(chance.sample(range(size), chance.randint(1, size)))
        rank = loads.least(there)
        assert rank == min(there, key=lambda rank: (loads.each()[rank], rank))
        loads.add(rank, chance.randint(0, 9))
        other = chance.randrange(size)
        loads.add(other, -chance.randint(0, loads.each()[other]))


def test_what_is_past_is_forgotten() -> None:
    loads, there = LoadBalancer(2), frozenset({0, 1})
    for _ in range(1000):
        loads.add(loads.least(there), 1)
        loads.add(0, -loads.each()[0])
    assert len(loads._heap) < 100
