"""Streams of many ranks: each stands or falls by itself."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from whet.config.sections import DeadlinesSection
from whet.errors import WorkerLost
from whet.interfaces.workers import Heard
from whet.runtime.local import LocalCluster
from whet.runtime.wire import decode
from whet.runtime.workers import ConnectedWorkers
from whet_testing.contracts.workers import wait_until
from whet_testing.scripted_worker import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")

SIX = 6


@pytest.fixture
def six(tmp_path: Path) -> Iterator[ConnectedWorkers]:
    with LocalCluster(tmp_path) as cluster:
        yield cluster.worker_group("actor", SIX).spawn(TARGET, {})


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


def said(workers: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what arrives of streams and calls from now on."""
    heard: list[str] = []
    for connection in workers._connections:
        line = connection._line
        take = line._take
        monkeypatch.setattr(line, "_take", lambda b, take=take: (heard.append(decode(b)["say"]), take(b)))
    return heard


def test_a_stream_is_a_message_for_each_item_and_one_for_its_end(
    six: ConnectedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = said(six, monkeypatch)
    assert items(listen(six, {0: [0.0, 0.0], 1: [0.0], 2: []})) == {0: [0.0, 0.0], 1: [0.0], 2: []}
    wait_until(lambda: len(heard) == 6, "all was heard")
    assert sorted(heard) == ["done"] * 3 + ["part"] * 3


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_misses_the_deadline_is_named_and_ended_alone(tmp_path: Path, rank: int) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(generate=1.0)) as cluster:
        workers = cluster.worker_group("actor", SIX).spawn(TARGET, {})
        heard = listen(workers, {one: [0.6, 30.0 if one == rank else 0.6] for one in range(3)})
        assert items(heard) == {one: [0.6, 0.6] for one in range(3) if one != rank}
        assert f"actor rank {rank} failed in generate: no answer within 1 s" in str(errors(heard)[rank])
        assert [connection.dead for connection in workers._connections[:3]] == [one == rank for one in range(3)]


def test_closing_streams_cancels_what_is_left_of_them(six: ConnectedWorkers) -> None:
    async def run() -> None:
        awaited = {0, 1}  # the first is over by then, and cannot be cancelled
        async with aclosing(six.streams("nap", {0: [0.01], 1: [0.01, 100.0], 2: [100.0]})) as streams:
            async for heard in streams:
                awaited.discard(heard.rank)
                if not awaited:
                    return

    asyncio.run(run())
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")
    wait_until(lambda: [s["cancelled"] for s in six.call("state")][:3] == [0, 1, 1], "the workers have stopped")


def test_what_cannot_cross_fails_its_rank_alone(six: ConnectedWorkers) -> None:
    heard = listen(six, {0: [0.1], 1: [object()]})  # type: ignore[list-item]
    assert items(heard) == {0: [0.1]}
    assert "cross" in str(errors(heard)[1])
    wait_until(lambda: not any(connection.busy() for connection in six._connections), "nothing is waited for")


def test_of_shares_only_those_fail_that_cannot_cross(six: ConnectedWorkers) -> None:
    heard = listen(six, {0: [0.01], 1: [object()], 2: [0.01]})
    assert "object" in str(errors(heard)[1])
    assert set(items(heard)) == {0, 2}
