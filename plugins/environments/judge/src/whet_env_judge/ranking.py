"""Which responses of a group are compared with each other, and the share of comparisons that each one wins."""

from collections.abc import Mapping, Sequence
from itertools import combinations

Pair = tuple[int, int]


def pairs_of(count: int, each: int) -> list[Pair]:
    """Return pairs of `count` responses, so that each one is in at least `each` of them. 0: all pairs.

    Responses are compared with their neighbours on a ring.
    """
    if not each or each >= count - 1:
        return list(combinations(range(count), 2))
    ring = ((i, (i + step) % count) for step in range(1, (each + 1) // 2 + 1) for i in range(count))
    return sorted({(min(pair), max(pair)) for pair in ring})


def win_rates(count: int, won: Mapping[Pair, float]) -> Sequence[float]:
    """Return the mean result of each response. `won` has the share that the first of a pair won. Uncompared: 0.5."""
    results: list[list[float]] = [[] for _ in range(count)]
    for (first, second), share in won.items():
        results[first].append(share)
        results[second].append(1 - share)
    return [sum(one) / len(one) if one else 0.5 for one in results]
