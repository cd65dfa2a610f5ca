"""A replica that notes which weights it gets. It is built slowly, as a model is."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from whet.data.records import Completion, Request
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank


class Replica:
    """Writes a line for each weight sync: its rank, its process, and the version."""

    def __init__(self, rank: WorkerRank, notes: str) -> None:
        self.rank, self.notes = rank.rank, Path(notes)
        time.sleep(0.5)

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: str = "drain") -> None:
        """Record the call."""
        self.note(str(version))

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Completion]]:
        """Yield one token for each request, chosen by the request's seed. The note `off` changes its logprob."""
        off = self.notes.with_name("off")
        logprob = float(off.read_text()) if off.exists() else -1.0
        for r in requests:
            yield [Completion(r.id, np.array([r.seed]), np.array([logprob], np.float32), "length", ((0, 7),))]

    def sleep(self) -> int:
        """Record the call, and return that 10 bytes were freed."""
        self.note("asleep")
        return 10

    def wake(self) -> None:
        """Record the call."""
        self.note("awake")

    def note(self, what: str) -> None:
        """Write a line."""
        with self.notes.open("a") as file:
            file.write(f"{self.rank} {os.getpid()} {what}\n")

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()
