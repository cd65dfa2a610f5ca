"""The load of each replica, and which replica has the least."""

import heapq


class LoadBalancer:
    """A load for each rank. Finding the least one looks at a few ranks, however many there are."""

    def __init__(self, size: int) -> None:
        self._loads = [0] * size
        self._there: frozenset[int] = frozenset()
        self._heap: list[tuple[int, int]] = []
        """(load, rank): for each present rank its load, or a smaller number if the load has grown, and some outdated
        pairs."""

    def add(self, rank: int, amount: int) -> None:
        """Change the load of a rank."""
        self._loads[rank] += amount
        if amount < 0 and rank in self._there:
            heapq.heappush(self._heap, (self._loads[rank], rank))
            if len(self._heap) > 4 * len(self._there) + 64:
                self._build()

    def least(self, there: frozenset[int]) -> int:
        """Return the rank of the least load among the present ranks; the lowest rank of several."""
        if there is not self._there:
            self._there = there
            self._build()
        heap, loads = self._heap, self._loads
        while heap[0][0] != loads[heap[0][1]]:
            load, rank = heap[0]
            if load < loads[rank]:
                heapq.heapreplace(heap, (loads[rank], rank))
            else:
                heapq.heappop(heap)
        return heap[0][1]

    def each(self) -> list[int]:
        """Return all loads, by rank."""
        return list(self._loads)

    def _build(self) -> None:
        self._heap = [(self._loads[rank], rank) for rank in self._there]
        heapq.heapify(self._heap)
