"""Workers that say what they were given, and what they have done, for `test_branch.py`."""

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from whet.data.batch import Batch
from whet.data.metrics import Metric, largest, mean, total
from whet.interfaces.workers import WorkerRank
from whet.runtime.relay import Leader
from whet.testing.scripted_worker import ObedientWorker


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


class NotingWorker(ObedientWorker):
    def __init__(self, rank: WorkerRank, slow: str = "", **arguments: Any) -> None:
        """Where there is a file `slow`, this takes a while."""
        super().__init__(rank, **arguments)
        if slow and Path(slow).exists():
            time.sleep(2.0)

    def note_slowly(self, value: Any, seconds: list[float]) -> None:
        """Note a value, and take as long as it says for this rank."""
        self.note(value, seconds[self.rank.rank])

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

    def note(self, value: Any, seconds: float = 0.0) -> None:
        """Note a value, and take so long for it."""
        self.seen.append(value)
        time.sleep(seconds)

    def await_file(self, path: str, rank: int) -> None:
        """Wait, where this is that rank, until there is such a file."""
        while self.rank.rank == rank and not Path(path).exists():
            time.sleep(0.01)

    def cut(self, rank: int) -> None:
        """Break this leader's connection to a sibling."""
        for leader in [found for found in gc.get_objects() if isinstance(found, Leader) and rank in found._lines]:
            sock = leader._lines[rank]._socket
            assert sock is not None
            sock.shutdown(socket.SHUT_RDWR)
