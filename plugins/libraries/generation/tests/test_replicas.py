"""Replicas in real processes, of which one is replaced while weights are synced."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Completion, Request, Sampling
from whet.errors import WeightSyncError, WhetError, WorkerError, WorkerLost
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import Give, Workers
from whet.runtime.local import LocalCluster
from whet_generation.replicas import Replicas

LINK = TransferSpec("disk", "somewhere", "7-0", 7, timeout_seconds=20.0)


class Proof:
    """Asks a replica for one token twice, and wants a logprob of -1."""

    def requests(self, replica: int) -> list[Request]:
        seeds = enumerate((11, 12))
        return [Request(f"{replica}-{i}", np.arange(3 + i), Sampling(1), seed, replica=replica) for i, seed in seeds]

    def check(self, replica: int, completions: Sequence[Completion]) -> float:
        gap = float(np.mean([abs(completion.logprobs[0] + 1.0) for completion in completions]))
        if gap > 0.1:
            words = f"its logprobs of {len(completions)} tokens are {gap:.3g} nats off on average"
            raise WeightSyncError(f"after the weight sync of version 7 replica {replica} of the generator {words}")
        return gap


class Losing:
    """Workers whose rank 1 dies at the moment at which it is to be asked, and is found lost before it is."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self.size, self.alone = workers, workers.size, True
        self.found_lost: Callable[[], object] = lambda: None
        self.replaced = threading.Event()
        self.replaced_before_it_was_asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def start_each(self, ranks: list[int], method: str, *args: Any, **options: Any) -> Any:
        if not self.replaced.is_set():
            os.kill(self._workers.start_on(1, "pid").result()[0], signal.SIGKILL)
            self.found_lost()
            self.replaced_before_it_was_asked = self.replaced.wait(1.5)
        return self._workers.start_each(ranks, method, *args, **options)

    def restart(self, rank: int) -> None:
        self.replaced.set()
        self._workers.restart(rank)


class Timed:
    """Workers that record the deadlines of calls."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self.seconds = workers, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def start_each(self, ranks: list[int], method: str, *args: Any, **options: Any) -> Any:
        self.seconds.append(options["timeout_seconds"])
        return self._workers.start_each(ranks, method, *args, **options)


class Replacing:
    """Grants all; what comes back gets the weights of now once the weight sync under way has ended."""

    def __init__(self) -> None:
        self.over, self.back, self.losses = threading.Event(), threading.Event(), Counter[str]()

    def grant(self, error: WorkerLost) -> bool:
        return True

    def sync(self, give: Give) -> None:
        assert self.over.wait(20.0)
        give(LINK, Proof())
        self.back.set()


def test_a_replica_that_is_replaced_while_weights_are_handed_over_gets_them_once_and_then(tmp_path: Path) -> None:
    replacing, notes = Replacing(), tmp_path / "notes"
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = Losing(cluster.worker_group("generator", 2).spawn(target, {"notes": str(notes)}))
        replicas = Replicas(workers, replacing)
        error = WorkerLost("generator", 1, "generate", "killed by signal 9")
        workers.found_lost = lambda: replicas._replica_set.lost(1, 0, error)
        replicas.receive_weights(LINK, 7).result()
        replacing.over.set()
        assert replacing.back.wait(20.0)
        pids = [workers.start_on(rank, "pid").result()[0] for rank in range(2)]
        replicas.close()
    assert not workers.replaced_before_it_was_asked
    received = sorted(line.split() for line in notes.read_text().splitlines())
    assert received == [["0", str(pids[0]), "7"], ["1", str(pids[1]), "7"]]


def test_a_replica_may_finish_its_longest_request_before_it_takes_weights(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = Timed(cluster.worker_group("generator").spawn(target, {"notes": str(tmp_path / "notes")}))
        replicas = Replicas(workers, Replacing())
        replicas.receive_weights(evolve(LINK, drain_seconds=1800.0), 7).result()
        replicas.close()
    assert workers.seconds == [1820.0]


def test_a_replica_that_comes_back_with_other_weights_serves_nobody(tmp_path: Path) -> None:
    replacing = Replacing()
    replacing.over.set()
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = cluster.worker_group("generator", 1).spawn(target, {"notes": str(tmp_path / "notes")})
        replicas = Replicas(workers, replacing)
        (tmp_path / "off").write_text("-1.5")
        replicas._replica_set.lost(0, 0, WorkerLost("generator", 0, "generate", "killed by signal 9"))
        with pytest.raises(
            WorkerError, match="after the weight sync of version 7 replica 0 of the generator"
        ) as caught:
            asyncio.run(replicas.generate(Request("r", np.arange(3), Sampling(1), 5)))
        replicas.close()
    assert "its logprobs of 2 tokens are 0.5 nats off on average" in str(caught.value)
    assert not replacing.back.is_set()


def test_a_replica_that_is_lost_while_all_sleep_is_restarted_when_they_wake(tmp_path: Path) -> None:
    replacing, notes = Replacing(), tmp_path / "notes"
    replacing.over.set()
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = cluster.worker_group("generator", 2).spawn(target, {"notes": str(notes)})
        replicas = Replicas(workers, replacing)
        assert replicas.sleep() == 20
        os.kill(workers.start_on(1, "pid").result()[0], signal.SIGKILL)
        replicas.receive_weights(LINK, 7).result()
        assert replicas.sleep() == 10, "one is there"
        assert not replacing.back.wait(1.0), "it took memory that is somebody else's"
        with pytest.raises(WhetError, match="request 1 comes while the generator sleeps"):
            asyncio.run(replicas.generate(Request("1", np.arange(3), Sampling(1), 5)))
        replicas.wake()
        assert replacing.back.wait(20.0)
        found = asyncio.run(replicas.generate(Request("2", np.arange(3), Sampling(1), 5, replica=1)))
        pid = workers.start_on(1, "pid").result()[0]
        replicas.close()
    assert found.tokens.tolist() == [5]
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert [what for rank, process, what in lines if (rank, process) == ("1", str(pid))] == ["7"]
    assert [what for rank, _, what in lines if rank == "0"] == ["asleep", "7", "asleep", "awake"]


def test_a_replica_that_comes_back_when_the_others_sleep_again_sleeps_as_well(tmp_path: Path) -> None:
    replacing, notes = Replacing(), tmp_path / "notes"
    with LocalCluster(tmp_path) as cluster:
        target = f"file:{Path(__file__).with_name('replica.py')}:Replica"
        workers = cluster.worker_group("generator", 2).spawn(target, {"notes": str(notes)})
        replicas = Replicas(workers, replacing)
        assert replicas.present() == (2, 2)
        os.kill(workers.start_on(1, "pid").result()[0], signal.SIGKILL)
        replicas.receive_weights(LINK, 7).result()
        assert replicas.present() == (1, 2)
        replicas.sleep()
        replacing.over.set()
        assert replacing.back.wait(20.0)
        pid = workers.start_on(1, "pid").result()[0]
        replicas.wake()
        replicas.close()
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert [what for rank, process, what in lines if (rank, process) == ("1", str(pid))] == ["7", "asleep", "awake"]
