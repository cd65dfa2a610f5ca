"""Workers that say what they were given, for `test_branch.py`."""

from collections.abc import AsyncIterator
from typing import Any

from whet.cluster.slices import WorkerRank
from whet.data.batch import Batch
from whet.metrics import Metric, largest, mean, total


class CountingWorker:
    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank.rank

    def shares(self, value: Any) -> dict[str, Any]:
        return {"rank": self.rank, "value": value}

    def tokens(self, part: Batch, word: str) -> dict[str, Any]:
        return {"rank": self.rank, "tokens": part["tokens"], "lengths": part["lengths"], "word": word}

    def count(self, part: Batch, word: str) -> dict[str, Metric]:
        longest = float(part["lengths"].max()) if part.sequences else 0.0
        return {
            "tokens": total(float(part.tokens)),
            "longest": largest(longest),
            "mean": mean(float(part.tokens), float(part.sequences)),
        }

    def overwrite(self, array: Any) -> float:
        before = float(array.sum())
        array[:] = self.rank + 1
        return before

    async def count_up(self, numbers: int) -> AsyncIterator[int]:
        for number in range(numbers):
            yield number
