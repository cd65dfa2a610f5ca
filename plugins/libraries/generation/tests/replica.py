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
        """Note it."""
        self.note(str(version))

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Completion]]:
        """Give one token each, by the request's seed; as likely as the note `off` says where there is one."""
        off = self.notes.with_name("off")
        logprob = float(off.read_text()) if off.exists() else -1.0
        for r in requests:
            yield [Completion(r.id, np.array([r.seed]), np.array([logprob], np.float32), "length", ((0, 7),))]

    def sleep(self) -> int:
        """Note it, and give 10 bytes back."""
        self.note("asleep")
        return 10

    def wake(self) -> None:
        """Note it."""
        self.note("awake")

    def note(self, what: str) -> None:
        """Write a line."""
        with self.notes.open("a") as file:
            file.write(f"{self.rank} {os.getpid()} {what}\n")

    def pid(self) -> int:
        """Give that of its process."""
        return os.getpid()
