"""Calls through leaders: the ranks of a role in groups, played at a size of a few processes."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from whet.config.sections import DeadlinesSection
from whet.data import metrics
from whet.data.batch import Batch, from_sequences
from whet.errors import WorkerError, WorkerLost
from whet.interfaces.workers import RankArguments, Slice, Workers
from whet.runtime.branch import Branch
from whet.runtime.groups import node_groups
from whet.runtime.launcher import Cluster
from whet.runtime.local import LocalCluster, LocalProcess
from whet.runtime.workers import ConnectedWorkers
from whet.testing.contracts.workers import ProcessWorkersContract, alive, collect, wait_until
from whet.testing.scripted_worker import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")

COUNTING = f"file:{Path(__file__).with_name('counting.py')}:CountingWorker"
NOTING = f"file:{Path(__file__).with_name('counting.py')}:NotingWorker"
SIX, LEADERS = 6, (0, 3)
"""Ranks, in two groups of three, and who leads those."""


class TestThroughLeaders(ProcessWorkersContract):
    """Four ranks in two groups of two."""

    ranks = 4

    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], Slice]]:
        with LocalCluster(folder, fan_out=3) as cluster:
            yield cluster.slice

    def test_they_are_led(self, tmp_path: Path) -> None:
        with self.cluster(tmp_path) as make_slice:
            workers = make_slice("actor", self.ranks).spawn(TARGET, {})
            assert workers.call("add", 1) == [1] * self.ranks
            assert isinstance(workers, ConnectedWorkers)
            assert workers._groups.led[0]


class TestThroughLeadersElsewhere(TestThroughLeaders):
    """The same, with every process on a node of its own: a group of three, and one that is alone."""

    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], Slice]]:
        with nodes_apart(), super().cluster(folder) as make_slice:
            yield make_slice


@contextmanager
def nodes_apart() -> Iterator[None]:
    """Have no two processes on one node, as far as anybody knows."""
    with mock.patch.object(LocalProcess, "node", property(lambda process: process._name)):
        yield


@pytest.fixture
def six(tmp_path: Path) -> Iterator[ConnectedWorkers]:
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        yield cluster.slice("actor", SIX).spawn(NOTING, {})


def pids(workers: Workers) -> list[int]:
    return [state["pid"] for state in workers.call("state")]


def pids_of(workers: ConnectedWorkers) -> list[int]:
    """Tell them without asking."""
    return [process.pid for process in workers.processes]


def messages_to(workers: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which processes the driver sends anything to from now on."""
    sent: list[str] = []
    for connection in workers._connections:
        send = connection._line.send
        monkeypatch.setattr(
            connection._line,
            "send",
            lambda buffers, send=send, name=connection.name: (sent.append(name), send(buffers)),
        )
    return sent


def batch() -> Batch:
    lengths = [5, 3, 8, 1, 1, 4, 7, 2, 6, 9, 3]
    rows = [{"tokens": np.arange(n) + 10 * n, "loss_mask": np.ones(n, bool)} for n in lengths]
    return from_sequences(rows, prompt_lengths=[1] * len(rows), group=[n // 2 for n in range(len(rows))])


def asked(cluster: Cluster) -> dict[str, Any]:
    """What six ranks give to calls of all kinds."""
    workers = cluster.slice("backend", SIX).spawn(COUNTING, {})
    arguments = RankArguments((batch().shard(SIX), "all"))
    tuples = [(part, str(rank)) for rank, part in enumerate(batch().shard(SIX))]
    return {
        "call": workers.call("shares", {"a": np.arange(3)}),
        "shards": workers.scatter("tokens", arguments),
        "tuples": workers.scatter("tokens", tuples),
        "metrics": workers.scatter_metrics("count", arguments),
        "metrics of tuples": workers.scatter_metrics("count", tuples),
        "one": workers.start_on(4, "tokens", *tuples[4]).result(),
        "streamed": collect(workers.stream(5, "count_up", 3)),
    }


def test_answers_are_those_of_ranks_that_are_asked_one_by_one(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "one") as cluster:
        alone = asked(cluster)
    with LocalCluster(tmp_path / "two", fan_out=2) as cluster:
        led = asked(cluster)
    assert [answer["rank"] for answer in led["shards"]] == list(range(SIX))
    assert np.array_equal(np.concatenate([answer["tokens"] for answer in led["shards"]]), batch()["tokens"])
    np.testing.assert_equal(led, alone)
    assert metrics.plain(led["metrics"]) == {"tokens": batch().tokens, "longest": 9.0, "mean": batch().tokens / 11}


def test_the_driver_speaks_to_leaders_alone(six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    six.call("add", 1)
    sent = messages_to(six, monkeypatch)
    assert six.call("add", 1) == [1] * SIX
    assert six.scatter("add", [(rank,) for rank in range(SIX)]) == list(range(SIX))
    assert six.start_on(4, "add", 1).result() == [1]
    assert sent == ["actor-0", "actor-3", "actor-0", "actor-3", "actor-4"]


def test_nobody_leads_where_streams_are_all_that_is_asked_for(six: ConnectedWorkers) -> None:
    assert collect(six.stream(4, "count", 2)) == [(4, 0), (4, 1)]
    assert six._groups.led == ([], list(range(SIX)))


def each(workers: ConnectedWorkers, method: str, *args: Any, seconds: float = 20.0) -> list[Any]:
    started = workers.start_each(range(SIX), method, *args, timeout_seconds=seconds)
    return [started.result(rank) for rank in range(SIX)]


def whole(workers: ConnectedWorkers) -> int:
    """How many groups are led."""
    return sum(branch._whole for branch in workers._groups.led[0])


@pytest.fixture
def formed(six: ConnectedWorkers) -> ConnectedWorkers:
    """Six whose groups are formed by calls of each."""
    assert each(six, "add", 1) == [1] * SIX
    wait_until(lambda: whole(six) == 2, "groups are formed in the background")
    return six


def test_each_is_asked_directly_until_groups_are_formed_and_through_leaders_from_then_on(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(six._groups, "form_soon", lambda: None)
    sent = messages_to(six, monkeypatch)
    assert each(six, "add", 1) == [1] * SIX
    assert sent == [f"actor-{rank}" for rank in range(SIX)]
    six._groups.form()
    sent.clear()
    assert each(six, "add", 1) == [1] * SIX
    assert sent == ["actor-0", "actor-3"]
    sent.clear()
    started = six.start_each([0, 1, 2, 4], "add", 1)
    assert [started.result(rank) for rank in (0, 1, 2, 4)] == [1] * 4
    assert sent == ["actor-0", "actor-4"], "a group of which not all are asked"


def test_an_answer_of_each_does_not_wait_for_that_of_a_sibling(formed: ConnectedWorkers, tmp_path: Path) -> None:
    started = formed.start_each(range(SIX), "await_file", str(tmp_path / "go"), 4, timeout_seconds=60.0)
    begun = time.monotonic()
    assert [started.result(rank) for rank in (0, 1, 2, 3, 5)] == [None] * 5
    assert time.monotonic() - begun < 20.0, "after half of the time each is asked directly"
    assert not started.done()
    (tmp_path / "go").touch()
    assert started.result(4) is None


def test_a_group_may_be_of_several_nodes(tmp_path: Path) -> None:
    with nodes_apart(), LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
        assert workers.call("add", 1) == [1] * SIX
        assert [branch.ranks for branch in workers._groups.led[0]] == [(0, 1, 2), (3, 4, 5)]


@pytest.mark.parametrize("place", [{"address": ["127.0.0.1", 1]}, {"token": b"another one"}])
def test_a_group_whose_leader_cannot_be_reached_is_asked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any]
) -> None:
    ask = Branch._ask

    def misled(branch: Branch, rank: int, number: int, message: dict[str, Any], done: Any) -> None:
        if message["do"] == "join" and rank == 4:
            message = {**message, "place": {**message["place"], **place}}
        ask(branch, rank, number, message, done)

    monkeypatch.setattr(Branch, "_ask", misled)
    with nodes_apart(), LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
        assert workers.call("add", 1) == [1] * SIX
        assert [branch.ranks for branch in workers._groups.led[0]] == [(0, 1, 2)]
        sent = messages_to(workers, monkeypatch)
        assert workers.call("add", 2) == [2] * SIX
        assert sent == ["actor-0", "actor-3", "actor-4", "actor-5"]


def test_what_a_rank_failed_with_is_heard_after_all_others_have_answered(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own connection may be slower than that of its leader."""
    six.call("add", 1)
    slow, held = six._connections[4], []
    take = slow._line._take
    monkeypatch.setattr(slow._line, "_take", held.append)
    joined = mock.Mock(wraps=six._connections[3]._line._take)
    monkeypatch.setattr(six._connections[3]._line, "_take", joined)
    pending = six.start("fail", (4,))
    wait_until(lambda: joined.called and len(held) > 0, "the leader and the rank have said what there is")
    assert not pending.done()
    for buffers in held:
        take(buffers)
    with pytest.raises(WorkerError, match="actor rank 4 failed in fail: ValueError: as told"):
        pending.result()
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")


def test_few_ranks_are_asked_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("actor", 3).spawn(TARGET, {})
        sent = messages_to(workers, monkeypatch)
        workers.call("add", 1)
        assert sent == ["actor-0", "actor-1", "actor-2"]


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
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
@pytest.mark.parametrize("rank", [0, 3, 4])
def test_what_each_rank_is_asked_for_itself_does_not_depend_on_its_leader(
    formed: ConnectedWorkers, rank: int, number: signal.Signals
) -> None:
    os.kill(pids_of(formed)[rank], number)
    started = formed.start_each(range(SIX), "note", "once", timeout_seconds=4.0)
    others = [one for one in range(SIX) if one != rank]
    assert [started.result(one) for one in others] == [None] * (SIX - 1)
    with pytest.raises(WorkerLost, match=rf"actor rank {rank} failed in note") as caught:
        started.result(rank)
    assert (number == signal.SIGKILL) or "no answer within 4 s; its process is stopped" in str(caught.value)
    assert [formed.start_on(one, "state").result()[0]["seen"] for one in others] == [["once"]] * (SIX - 1)
    formed.restart(rank)
    assert each(formed, "add", 1) == [1] * SIX
    wait_until(lambda: whole(formed) == 2, "the group is formed again")


def test_a_leader_that_is_slow_itself_is_asked_directly_as_well(formed: ConnectedWorkers) -> None:
    before = pids_of(formed)
    slow = [0.0, 0.0, 0.0, 1.8, 1.3, 0.0]  # it passes on what a sibling says while it owes an answer itself
    started = formed.start_each(range(SIX), "note_slowly", "once", slow, timeout_seconds=2.0)
    assert [started.result(rank) for rank in range(SIX)] == [None] * SIX
    assert [state["seen"] for state in each(formed, "state")] == [["once"]] * SIX
    assert pids_of(formed) == before


@pytest.mark.parametrize("count", [10, 4_000_000])
def test_who_has_a_leader_that_stands_still_has_all_the_time_that_there_is(
    formed: ConnectedWorkers, count: int
) -> None:
    """However large the answer is, which that leader does not take."""
    os.kill(pids_of(formed)[3], signal.SIGSTOP)
    started = formed.start_each(range(SIX), "give", count, 1.4, timeout_seconds=2.0)
    assert [len(started.result(rank)) for rank in (0, 1, 2, 4, 5)] == [count] * 5
    with pytest.raises(WorkerLost, match="actor rank 3 failed in give: no answer within 2 s; its process is stopped"):
        started.result(3)


def test_an_answer_is_given_to_the_driver_even_if_a_leader_takes_none(formed: ConnectedWorkers) -> None:
    started = formed.start_each(range(SIX), "give", 4_000_000, 1.4, timeout_seconds=2.0)
    time.sleep(0.3)
    os.kill(pids_of(formed)[3], signal.SIGSTOP)
    assert [len(started.result(rank)) for rank in (0, 1, 2, 4, 5)] == [4_000_000] * 5


def test_a_group_that_is_formed_again_passes_on_nothing_before_all_are_there(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(NOTING, {"slow": str(slow)})
        assert each(workers, "add", 1) == [1] * SIX
        wait_until(lambda: whole(workers) == 2, "groups are formed in the background")
        slow.touch()
        os.kill(pids_of(workers)[4], signal.SIGKILL)
        wait_until(lambda: workers._connections[4].dead, "its loss is known")
        workers._groups.renew(4)  # as where its leader says so first
        restarting = threading.Thread(target=workers.restart, args=(4,))
        restarting.start()
        time.sleep(1.0)  # its process is there, and its worker is being built
        others = [0, 1, 2, 3, 5]
        started = workers.start_each(others, "add", 1)
        assert [started.result(rank) for rank in others] == [1] * 5
        restarting.join()
        for _ in range(5):
            begun = time.monotonic()
            assert each(workers, "add", 1, seconds=8.0) == [1] * SIX
            assert time.monotonic() - begun < 3.0, "half of the time was waited for somebody"
        assert workers.call("add", 1) == [1] * SIX


@pytest.mark.parametrize("when", ["before", "under way", "over"])
def test_what_a_leader_has_passed_on_when_it_dies_is_done_once(formed: ConnectedWorkers, when: str) -> None:
    """And its answer is heard, whether it was given to that leader or not."""
    seconds = {"before": 0.0, "under way": 1.0, "over": 0.3}[when]
    started = formed.start_each(range(SIX), "note", "once", seconds)
    if when == "over":
        formed._connections[3]._line._take = lambda buffers: None  # it answers, and is not heard
    if when != "before":
        time.sleep(0.6)
    os.kill(pids_of(formed)[3], signal.SIGKILL)
    others = [0, 1, 2, 4, 5]
    assert [started.result(rank) for rank in others] == [None] * 5
    assert [formed.start_on(rank, "state").result()[0]["seen"] for rank in others] == [["once"]] * 5


def test_a_rank_that_loses_its_leader_and_lives_is_asked_directly_and_the_group_is_formed_again(
    formed: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pids_of(formed)
    started = formed.start_each(range(SIX), "note", "once", 0.5)
    time.sleep(0.2)
    formed.start_on(3, "cut", 4).result()
    assert [started.result(rank) for rank in range(SIX)] == [None] * SIX
    assert each(formed, "add", 1) == [1] * SIX
    wait_until(lambda: whole(formed) == 2, "the group is formed again")
    sent = messages_to(formed, monkeypatch)
    assert [state["seen"] for state in each(formed, "state")] == [["once"]] * SIX
    assert sent == ["actor-0", "actor-3"]
    assert pids_of(formed) == before


@pytest.mark.parametrize("rank", LEADERS)
def test_ranks_whose_leader_died_are_asked_one_by_one_until_it_is_back(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
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
    sent = messages_to(six, monkeypatch)
    assert six.call("add", 1) == [1] * SIX
    assert sent == ["actor-0", "actor-3"]


def test_a_call_under_way_outlives_the_restart_of_another_rank_of_its_group(six: ConnectedWorkers) -> None:
    slow, before = six.start("hang", 2.0), pids_of(six)
    six.restart(2)
    with pytest.raises(WorkerLost, match="actor rank 2 failed in hang"):
        slow.result()
    assert six.call("add", 1) == [1] * SIX  # by a new branch, while the leader of the old one waits for rank 1
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")
    assert [was == now for was, now in zip(before, pids_of(six), strict=True)] == [rank != 2 for rank in range(SIX)]


def test_after_a_death_those_that_have_answered_owe_nothing(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
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
    with pytest.raises(WorkerLost, match=rf"actor rank {rank} failed in train: no answer within 1 s") as caught:
        six.scatter("hang", arguments, phase="train", timeout_seconds=1.0)
    assert "in hang" in caught.value.last_words
    assert "actor-" not in caught.value.last_words  # as is said where there are several


@pytest.mark.parametrize("rank", [3, 4])
def test_of_ranks_that_miss_a_deadline_the_one_that_stands_still_is_named(six: ConnectedWorkers, rank: int) -> None:
    os.kill(pids(six)[rank], signal.SIGSTOP)
    with pytest.raises(WorkerLost, match=rf"rank {rank} failed in hang: .* its process is stopped"):
        six.call("hang", timeout_seconds=0.5)


@pytest.mark.parametrize("rank", [3, 4])
def test_a_process_that_stands_still_is_found_by_its_silence(tmp_path: Path, rank: int) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(heartbeat=1.5), fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
        stopped = pids(workers)[rank]
        pending = workers.start("hang", phase="train")
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=rf"rank {rank} failed in train: no sign of life for 1\.5 s; .* stopped"):
            pending.result()
        wait_until(lambda: not alive(stopped), "the process is gone")


def test_who_owes_an_answer_is_known(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
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


def test_a_leader_that_leads_for_two_roles_says_of_which_it_lost_a_rank(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]], fan_out=3) as cluster:
        sizes = {"backend": 8, "generator": SIX}
        slices = [cluster.slice(role, size) for role, size in sizes.items()]
        more, fewer = (part.spawn(NOTING, {}) for part in slices)
        assert more.call("add", 1) + fewer.call("add", 1) == [1] * (8 + SIX)
        before = pids(more)
        leader = more._groups.led[0][-1].ranks[0]
        more.start_on(leader, "cut", 7).result()  # a rank that the other role has not
        wait_until(lambda: bool(more._groups._unformed), "the leader has said that it lost a rank")
        assert more.call("add", 1) + fewer.call("add", 1) == [1] * (8 + SIX)
        assert pids(more) == before


def test_a_role_that_closes_while_its_ranks_are_asked_ends_no_process_of_another(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]], fan_out=3) as cluster:
        one, two = [cluster.slice(role, SIX).spawn(NOTING, {}) for role in ("backend", "generator")]
        two._groups.form()
        before = pids(one)
        started = two.start_each(range(SIX), "outlive_cancelling", 60.0)
        time.sleep(0.3)
        two.close()
        for rank in range(SIX):
            with suppress(WorkerError):  # it may have answered before it closed
                started.result(rank)
        time.sleep(0.5)
        assert pids(one) == before
        assert not any(math.isfinite(connection._deaf_until) for connection in one._connections)


@pytest.mark.parametrize("rank", [4, 5])
def test_a_rank_whose_answer_to_a_call_of_all_is_cut_off_is_ended_and_named(six: ConnectedWorkers, rank: int) -> None:
    six.call("add", 1)
    pending = six.start("later", "something", 2.0, phase="train")
    six.start_on(3, "cut", rank).result()
    with pytest.raises(WorkerLost, match=f"actor rank {rank} failed in train: .* closed the connection to rank 3"):
        pending.result()
    six.restart(rank)
    assert six.call("add", 1) == [1] * SIX


def test_what_a_leader_does_to_its_arguments_is_not_for_its_siblings(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        workers = cluster.slice("backend", SIX).spawn(COUNTING, {})
        assert workers.call("overwrite", np.zeros(3_000_000)) == [0.0] * SIX


def test_metrics_that_cannot_be_merged_are_complained_of_as_ever(six: ConnectedWorkers) -> None:
    with pytest.raises(AttributeError):
        six.scatter_metrics("add", [(1,)] * SIX)


def test_a_role_that_leaves_ends_no_process_that_another_one_lives_in(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]], fan_out=3) as cluster:
        first, second = (cluster.slice(role, SIX) for role in ("backend", "generator"))
        one, two = first.spawn(TARGET, {}), second.spawn(TARGET, {})
        before = pids(one)
        assert pids(two) == before
        one.close()
        assert two.call("add", 1) == [1] * SIX
        time.sleep(0.3)
        assert pids(two) == before


def test_ranks_are_grouped_by_node_and_nearly_equally() -> None:
    assert node_groups(["a"] * 5, 3) == [[0, 1], [2, 3, 4]]
    assert node_groups(["a", "b"] * 3, 3) == [[0, 2, 4], [1, 3, 5]]
    assert node_groups(["a", "b"] * 3, 6) == [[0, 2, 4, 1, 3, 5]]
    assert node_groups(["a", "a", "b"], 2) == [[0, 1]]
    assert [len(group) for group in node_groups([str(n // 8) for n in range(1000)], 250)] == [248, 248, 248, 248, 8]
    assert [len(group) for group in node_groups([""] * 1000, 63)] == [62, 63] * 8
