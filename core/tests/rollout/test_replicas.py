"""Replicas in real processes, of which one is replaced while weights are handed over."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from whet.cluster.local import LocalCluster
from whet.cluster.slices import Workers
from whet.errors import WorkerLost
from whet.refit.link import Link
from whet.rollout.replicas import Replicas

LINK = Link("disk", "somewhere", "7-0", 7, timeout_seconds=20.0)


class Losing:
    """Workers whose rank 1 dies at the moment at which it is to be asked, and is found lost before it is."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self.size, self.alone = workers, workers.size, True
        self.found_lost: Callable[[], object] = lambda: None
        self.replaced = threading.Event()
        self.replaced_before_it_was_asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def start_on(self, rank: int, method: str, *args: Any, **options: Any) -> Any:
        if rank == 1 and not self.replaced.is_set():
            os.kill(self._workers.start_on(1, "pid").result()[0], signal.SIGKILL)
            self.found_lost()
            self.replaced_before_it_was_asked = self.replaced.wait(1.5)
        return self._workers.start_on(rank, method, *args, **options)

    def restart(self, rank: int) -> None:
        self.replaced.set()
        self._workers.restart(rank)


class Replacing:
    """Grants all; what comes back gets the weights of now once the hand-over under way has ended."""

    def __init__(self) -> None:
        self.over, self.back, self.losses = threading.Event(), threading.Event(), Counter[str]()

    def grant(self, error: WorkerLost) -> bool:
        return True

    def hand_over(self, give: Callable[[Link | None], None]) -> None:
        assert self.over.wait(20.0)
        give(LINK)
        self.back.set()


def test_a_replica_that_is_replaced_while_weights_are_handed_over_gets_them_once_and_then(tmp_path: Path) -> None:
    replacing, notes = Replacing(), tmp_path / "notes"
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = Losing(cluster.slice("generator", 2).spawn(target, {"notes": str(notes)}))
        replicas = Replicas(workers, SimpleNamespace(replacing=replacing))  # type: ignore[arg-type]
        error = WorkerLost("generator", 1, "generate", "killed by signal 9")
        workers.found_lost = lambda: replicas._roster.lost(1, 0, error)
        replicas.receive_weights(LINK, 7).result()
        replacing.over.set()
        assert replacing.back.wait(20.0)
        pids = [workers.start_on(rank, "pid").result()[0] for rank in range(2)]
        replicas.close()
    assert not workers.replaced_before_it_was_asked
    received = sorted(line.split() for line in notes.read_text().splitlines())
    assert received == [["0", str(pids[0]), "7"], ["1", str(pids[1]), "7"]]
