"""Calls of all ranks and of each rank: what one of six does, and what becomes of the others."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.config.sections import DeadlinesSection
from whet.data import metrics
from whet.data.batch import Batch, from_sequences
from whet.errors import WorkerError, WorkerLost
from whet.interfaces.workers import Workers
from whet.runtime.channel import frame
from whet.runtime.local import LocalCluster
from whet.runtime.workers import ConnectedWorkers
from whet_testing.contracts.workers import alive, wait_until
from whet_testing.scripted_worker import TARGET

pytestmark = pytest.mark.usefixtures("forked_workers", "no_orphans")

COUNTING = f"file:{Path(__file__).with_name('counting.py')}:CountingWorker"
NOTING = f"file:{Path(__file__).with_name('counting.py')}:NotingWorker"
SIX = 6


@pytest.fixture
def six(tmp_path: Path) -> Iterator[ConnectedWorkers]:
    with LocalCluster(tmp_path) as cluster:
        yield cluster.worker_group("actor", SIX).spawn(NOTING, {})


def pids(workers: Workers) -> list[int]:
    return [state["pid"] for state in workers.call("state")]


def batch() -> Batch:
    lengths = [5, 3, 8, 1, 1, 4, 7, 2, 6, 9, 3]
    rows = [{"tokens": np.arange(n) + 10 * n, "loss_mask": np.ones(n, bool)} for n in lengths]
    return from_sequences(rows, prompt_lengths=[1] * len(rows), group=[n // 2 for n in range(len(rows))])


def test_shards_reach_their_ranks_and_metrics_can_be_merged(tmp_path: Path) -> None:
    arguments = [(part, "all") for part in batch().shard(SIX)]
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", SIX).spawn(COUNTING, {})
        found = workers.scatter("tokens", arguments)
        merged = metrics.merge(workers.scatter("count", arguments))
    assert [answer["rank"] for answer in found] == list(range(SIX))
    assert np.array_equal(np.concatenate([answer["tokens"] for answer in found]), batch()["tokens"])
    assert metrics.plain(merged) == {"tokens": batch().tokens, "longest": 9.0, "mean": batch().tokens / 11}


def test_what_all_ranks_are_called_with_is_framed_once(six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    framed = []
    monkeypatch.setattr("whet.runtime.workers.frame", lambda buffers: framed.append(1) or frame(buffers))
    assert six.call("add", 1) == [1] * SIX
    assert each(six, "add", 1) == [1] * SIX
    assert len(framed) == 2
    assert six.scatter("add", [(rank,) for rank in range(SIX)]) == list(range(SIX))
    assert len(framed) == 2 + SIX


def each(workers: ConnectedWorkers, method: str, *args: Any, seconds: float = 20.0) -> list[Any]:
    started = workers.start_each(range(SIX), method, *args, timeout_seconds=seconds)
    return [started.result(rank) for rank in range(SIX)]


def test_an_answer_of_each_does_not_wait_for_that_of_another(six: ConnectedWorkers, tmp_path: Path) -> None:
    started = six.start_each(range(SIX), "await_file", str(tmp_path / "go"), 4, timeout_seconds=60.0)
    assert [started.result(rank) for rank in (0, 1, 2, 3, 5)] == [None] * 5
    assert not started.done()
    (tmp_path / "go").touch()
    assert started.result(4) is None


@pytest.mark.parametrize("rank", [0, 5])
def test_a_killed_process_fails_the_call_under_way_and_is_named(six: ConnectedWorkers, rank: int) -> None:
    pid = pids(six)[rank]
    pending = six.start("hang", phase="train")
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match=f"actor rank {rank} failed in train: its process was killed by SIGKILL"):
        pending.result()
    with pytest.raises(WorkerLost, match=f"actor rank {rank} failed in add: its process was killed by SIGKILL"):
        six.call("add", 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_each_rank_is_asked_for_itself_does_not_depend_on_another(
    six: ConnectedWorkers, rank: int, number: signal.Signals
) -> None:
    os.kill(pids(six)[rank], number)
    started = six.start_each(range(SIX), "note", "once", timeout_seconds=4.0)
    others = [one for one in range(SIX) if one != rank]
    assert [started.result(one) for one in others] == [None] * (SIX - 1)
    with pytest.raises(WorkerLost, match=rf"actor rank {rank} failed in note") as caught:
        started.result(rank)
    assert (number == signal.SIGKILL) or "no answer within 4 s; its process is stopped" in str(caught.value)
    assert [six.start_on(one, "state").result()[0]["seen"] for one in others] == [["once"]] * (SIX - 1)
    six.restart(rank)
    assert each(six, "add", 1) == [1] * SIX


@pytest.mark.parametrize("count", [10, 4_000_000])
def test_beside_a_rank_that_stands_still_the_others_have_all_the_time_that_there_is(
    six: ConnectedWorkers, count: int
) -> None:
    """However large their answers are."""
    os.kill(pids(six)[3], signal.SIGSTOP)
    started = six.start_each(range(SIX), "give", count, 4.2, timeout_seconds=6.0)
    assert [len(started.result(rank)) for rank in (0, 1, 2, 4, 5)] == [count] * 5
    with pytest.raises(WorkerLost, match="actor rank 3 failed in give: no answer within 6 s; its process is stopped"):
        started.result(3)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_others_are_asked_beside_a_rank_that_died_until_it_is_back(six: ConnectedWorkers, rank: int) -> None:
    os.kill(pids(six)[rank], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=f"rank {rank} failed in add"):
        six.call("add", 1)
    with pytest.raises(WorkerLost, match=f"rank {rank} failed in remember"):
        six.call("remember", "all the same")
    others = [one for one in range(SIX) if one != rank]

    def seen() -> list[list[str]]:
        return [six.start_on(one, "state").result()[0]["seen"] for one in others]

    wait_until(lambda: seen() == [["all the same"]] * len(others), "the others were asked")
    six.restart(rank)
    assert six.call("add", 1) == [1] * SIX


def test_a_call_under_way_fails_where_a_rank_of_it_is_restarted(six: ConnectedWorkers) -> None:
    before = pids(six)
    slow = six.start("hang", 2.0)
    six.restart(2)
    with pytest.raises(WorkerLost, match="actor rank 2 failed in hang"):
        slow.result()
    assert six.call("add", 1) == [1] * SIX
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")
    assert [was == now for was, now in zip(before, pids(six), strict=True)] == [rank != 2 for rank in range(SIX)]


def test_after_a_death_those_that_have_answered_owe_nothing(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("actor", SIX).spawn(TARGET, {})
        pid = pids(workers)[4]
        pending = workers.start("hang", 1.0, phase="train")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="actor rank 4"):
            pending.result()
        wait_until(lambda: cluster.under_way() == [], "all others have answered")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_rank_that_misses_the_deadline_is_named_and_not_those_that_have_answered(
    six: ConnectedWorkers, rank: int
) -> None:
    arguments = [(1000.0 if one == rank else 0.0,) for one in range(SIX)]
    with pytest.raises(WorkerLost, match=rf"actor rank {rank} failed in train: no answer within 3 s") as caught:
        six.scatter("hang", arguments, phase="train", timeout_seconds=3.0)
    assert "in hang" in caught.value.last_words
    assert "actor-" not in caught.value.last_words  # as is said where there are several


@pytest.mark.parametrize("rank", [3, 4])
def test_of_ranks_that_miss_a_deadline_the_one_that_stands_still_is_named(six: ConnectedWorkers, rank: int) -> None:
    os.kill(pids(six)[rank], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match=rf"rank {rank} failed in hang: .* its process is stopped"):
        six.call("hang", timeout_seconds=0.5)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_process_that_stands_still_is_found_by_its_silence(tmp_path: Path, rank: int) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(heartbeat=1.5)) as cluster:
        workers = cluster.worker_group("actor", SIX).spawn(TARGET, {})
        stopped = pids(workers)[rank]
        pending = workers.start("hang", phase="train")
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=rf"rank {rank} failed in train: no sign of life for 1\.5 s; .* stopped"):
            pending.result()
        wait_until(lambda: not alive(stopped), "the process is gone")


def test_who_owes_an_answer_is_known(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("actor", SIX).spawn(TARGET, {})
        pending = workers.start("hang", 1.0, phase="train")
        assert {(u.role, u.rank, u.phase) for u in cluster.under_way()} == {("actor", n, "train") for n in range(SIX)}
        assert pending.result() == [None] * SIX
        assert cluster.under_way() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_fails_the_call_at_once_and_the_next_one_passes(six: ConnectedWorkers, rank: int) -> None:
    with pytest.raises(WorkerError, match=rf"rank {rank} failed in fail: ValueError: as told") as caught:
        six.call("fail", (rank,))
    assert "raise ValueError(message)" in caught.value.details
    assert six.call("add", 1) == [1] * SIX


def test_a_rank_that_died_is_named_rather_than_those_that_noticed(six: ConnectedWorkers) -> None:
    with pytest.raises(WorkerLost, match=r"rank [1-5] failed in fail_or_die: its process exited with code 3") as caught:
        six.call("fail_or_die", 0)
    assert "rank 0 failed in fail_or_die: ConnectionError" in str(caught.value.__cause__)


def test_a_role_that_closes_while_its_ranks_are_asked_ends_no_process_of_another(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        one, two = [cluster.worker_group(role, SIX).spawn(NOTING, {}) for role in ("backend", "generator")]
        before = pids(one)
        started = two.start_each(range(SIX), "outlive_cancelling", 60.0)
        time.sleep(0.3)
        two.close()
        for rank in range(SIX):
            with suppress(WorkerError):  # it may have answered before it closed
                started.result(rank)
        time.sleep(0.5)
        assert pids(one) == before


def test_what_a_rank_does_to_its_arguments_is_not_for_the_others(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", SIX).spawn(COUNTING, {})
        assert workers.call("overwrite", np.zeros(3_000_000)) == [0.0] * SIX


def test_a_role_that_leaves_ends_no_process_that_another_one_lives_in(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        first, second = (cluster.worker_group(role, SIX) for role in ("backend", "generator"))
        one, two = first.spawn(TARGET, {}), second.spawn(TARGET, {})
        before = pids(one)
        assert pids(two) == before
        one.close()
        assert two.call("add", 1) == [1] * SIX
        time.sleep(0.3)
        assert pids(two) == before
