"""Streams of many ranks: asked through leaders, heard from each rank itself."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from whet.cluster.call import Call
from whet.cluster.local import LocalCluster
from whet.cluster.slices import Heard
from whet.cluster.wire import decode, encode
from whet.cluster.workers import ConnectedWorkers
from whet.config.sections import DeadlinesSection
from whet.errors import WorkerLost
from whet.testing.contracts.workers import wait_until
from whet.testing.obedient import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")

SIX = 6
"""Ranks, in two groups of three, which 0 and 3 lead."""


@pytest.fixture
def six(tmp_path: Path) -> Iterator[ConnectedWorkers]:
    with LocalCluster(tmp_path, fan_out=3) as cluster:
        yield cluster.slice("actor", SIX).spawn(TARGET, {})


def listen(workers: ConnectedWorkers, shares: dict[int, list[float]], then: Callable[[], None] = int) -> list[Heard]:
    """What comes of streams; something is done 0.3 s after they were asked."""

    async def run() -> list[Heard]:
        asyncio.get_running_loop().call_later(0.3, then)
        return [heard async for heard in workers.streams("nap", shares, phase="generate")]

    return asyncio.run(asyncio.wait_for(run(), 30.0))


def items(heard: list[Heard]) -> dict[int, list[Any]]:
    """The items of each rank whose stream has not failed."""
    failed = {one.rank for one in heard if one.error is not None}
    ranks = sorted({one.rank for one in heard} - failed)
    return {rank: [item[1] for one in heard if one.rank == rank for item in one.items] for rank in ranks}


def errors(heard: list[Heard]) -> dict[int, Exception]:
    return {one.rank: one.error for one in heard if one.error is not None}


def said(workers: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Note which processes are told something from now on, and what is heard of streams and calls."""
    told: list[str] = []
    heard: list[str] = []
    for connection in workers._connections:
        line = connection._line
        send, take = line.send, line._take
        monkeypatch.setattr(line, "send", lambda b, send=send, name=connection.name: (told.append(name), send(b)))
        monkeypatch.setattr(line, "_take", lambda b, take=take: (heard.append(decode(b)["say"]), take(b)))
    return told, heard


def test_many_are_asked_through_leaders_and_one_of_a_group_is_asked_itself(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, _ = said(six, monkeypatch)
    assert items(listen(six, {rank: [0.0, 0.01] for rank in (1, 2, 5)})) == {rank: [0.0, 0.01] for rank in (1, 2, 5)}
    assert told == ["actor-0", "actor-5"]


def test_a_stream_ends_with_its_last_item(six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    _, heard = said(six, monkeypatch)
    assert items(listen(six, {0: [0.0, 0.0], 1: [0.0], 2: []})) == {0: [0.0, 0.0], 1: [0.0], 2: []}
    wait_until(lambda: len(heard) == 5, "all was heard")
    assert sorted(heard) == ["done", "joined", "last", "last", "part"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_takes_no_other_stream_with_it(six: ConnectedWorkers, rank: int) -> None:
    pids = [state["pid"] for state in six.call("state")]
    heard = listen(six, {rank: [0.1, 1.0] for rank in range(3)}, lambda: os.kill(pids[rank], signal.SIGKILL))
    assert items(heard) == {other: [0.1, 1.0] for other in range(3) if other != rank}
    (error,) = errors(heard).values()
    assert isinstance(error, WorkerLost)
    assert f"actor rank {rank} failed in generate: its process was killed by SIGKILL" in str(error)
    states = [six.start_on(other, "state").result()[0] for other in range(3) if other != rank]
    assert [state["naps"] for state in states] == [1, 1]


def test_where_a_leader_dies_before_it_has_passed_on_what_it_was_asked_others_begin_all_the_same(
    six: ConnectedWorkers,
) -> None:
    leader = six.call("state")[0]["pid"]
    os.kill(leader, signal.SIGSTOP)
    heard = listen(six, {rank: [0.1] for rank in range(3)}, lambda: os.kill(leader, signal.SIGKILL))
    assert items(heard) == {1: [0.1], 2: [0.1]}
    assert set(errors(heard)) == {0}


def test_a_leader_that_stands_still_is_to_blame_and_not_those_who_were_not_asked(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(generate=1.0), fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
        os.kill(workers.call("state")[0]["pid"], signal.SIGSTOP)
        heard = listen(workers, {rank: [0.1] for rank in (1, 2)})
        assert items(heard) == {1: [0.1], 2: [0.1]}
        assert workers._connections[0].dead
        assert not workers._connections[1].dead


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_misses_the_deadline_is_named_and_ended_alone(tmp_path: Path, rank: int) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(generate=1.0), fan_out=3) as cluster:
        workers = cluster.slice("actor", SIX).spawn(TARGET, {})
        heard = listen(workers, {one: [0.6, 30.0 if one == rank else 0.6] for one in range(3)})
        assert items(heard) == {one: [0.6, 0.6] for one in range(3) if one != rank}
        assert f"actor rank {rank} failed in generate: no answer within 1 s" in str(errors(heard)[rank])
        assert [connection.dead for connection in workers._connections[:3]] == [one == rank for one in range(3)]


def test_one_that_was_asked_through_a_leader_hears_the_next_one_after_that(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = six.call("state")[0]["pid"]
    told, _ = said(six, monkeypatch)

    async def run() -> list[Heard]:
        os.kill(leader, signal.SIGSTOP)
        first = asyncio.create_task(follow({1: [0.0], 2: [0.0]}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(follow({1: [0.01]}))
        await asyncio.sleep(0.1)
        os.kill(leader, signal.SIGCONT)
        return [*await first, *await second]

    async def follow(shares: dict[int, list[float]]) -> list[Heard]:
        return [heard async for heard in six.streams("nap", shares, phase="generate")]

    assert len(asyncio.run(asyncio.wait_for(run(), 30.0))) == 3
    assert told == ["actor-0", "actor-0"]


def test_a_stream_that_is_asked_for_twice_begins_once(six: ConnectedWorkers) -> None:
    connection, got = six._connections[0], []
    buffers = encode({"do": "stream", "number": 1000, "slot": six._slot, "method": "nap", "args": ([0.1],)})
    call = Call("actor", 0, "generate", 30.0, lambda value, error: None, lambda item, last: got.append((item, last)))
    connection.ask(1000, buffers, call)
    connection.send(buffers)
    wait_until(lambda: got == [((0, 0.1), True)], "the stream is over")
    connection.send(buffers)
    time.sleep(0.3)
    assert six.start_on(0, "state").result()[0]["naps"] == 1


def test_a_stream_that_was_cancelled_before_it_came_does_not_begin(six: ConnectedWorkers) -> None:
    connection = six._connections[0]
    connection.tell({"do": "cancel", "number": 1000})
    connection.tell({"do": "stream", "number": 1000, "slot": six._slot, "method": "nap", "args": ([0.1],)})
    time.sleep(0.3)
    assert six.start_on(0, "state").result()[0]["naps"] == 0


def test_closing_streams_cancels_what_is_left_of_them(six: ConnectedWorkers) -> None:
    async def run() -> None:
        async with aclosing(six.streams("nap", {0: [0.01], 1: [0.01, 100.0], 2: [100.0]})) as streams:
            async for heard in streams:
                if heard.rank == 1:
                    return

    asyncio.run(run())
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")


def test_what_cannot_cross_is_said_and_nothing_is_left_waiting(six: ConnectedWorkers) -> None:
    with pytest.raises(Exception, match="cross"):
        listen(six, {0: [0.1], 1: [object()]})  # type: ignore[list-item]
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")
