"""A replica that notes which weights it gets. It is built slowly, as a model is."""

import os
import time
from pathlib import Path

from whet.cluster.slices import WorkerRank
from whet.refit.link import Link


class Replica:
    """Writes a line for each hand-over: its rank, its process, and the version."""

    def __init__(self, rank: WorkerRank, notes: str) -> None:
        self.rank, self.notes = rank.rank, Path(notes)
        time.sleep(0.5)

    def receive_weights(self, link: Link, version: int, running: str = "drain") -> None:
        """Note it."""
        with self.notes.open("a") as file:
            file.write(f"{self.rank} {os.getpid()} {version}\n")

    def pid(self) -> int:
        """Give that of its process."""
        return os.getpid()
