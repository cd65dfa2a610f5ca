"""Workers that say what they were given, and what they have done, for `test_many_ranks.py`."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from whet.data.batch import Batch
from whet.data.metrics import Metric, largest, mean, total
from whet.interfaces.workers import WorkerRank
from whet_testing.scripted_worker import ObedientWorker


class CountingWorker:
    def __init__(self, rank: WorkerRank) -> None:
        self.rank = rank.rank

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


class NotingWorker(ObedientWorker):
    async def outlive_cancelling(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.15)

    def close(self) -> None:
        """Take longer than that."""
        time.sleep(0.25)

    def give(self, count: int, seconds: float) -> Any:
        time.sleep(seconds)
        return np.zeros(count, np.uint8)

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def await_file(self, path: str, rank: int) -> None:
        """Wait, where this is that rank, until there is such a file."""
        while self.rank.rank == rank and not Path(path).exists():
            time.sleep(0.01)
