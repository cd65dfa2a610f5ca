"""A long wait is told with who waits for whom; a usual one is not."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from whet.data.spans import Spans
from whet.interfaces.weights import Proof, TransferSpec
from whet.rollout.event_loop import EpisodeLoop
from whet.run.stall_monitor import StallMonitor
from whet.run.weight_sync import WeightSync
from whet.runtime.local import LocalCluster
from whet_testing.fakes import FakeBackend, FakeGenerator
from whet_testing.scripted_worker import TARGET


@pytest.fixture
def spans() -> Spans:
    return Spans()


def looking(spans: Spans, tmp_path: Path, notice: float = 0.05, **more) -> StallMonitor:
    monitor = StallMonitor(spans, tmp_path / "waits.log", 0, **more)
    monitor._notice = notice  # no thread: the test looks
    return monitor


def test_a_wait_is_told_when_it_has_lasted_and_again_when_it_has_doubled(spans, tmp_path, capsys):
    monitor = looking(spans, tmp_path)
    with spans.phase("rollout", "take"):
        monitor.look()
        assert capsys.readouterr().err == ""
        told = []
        for _ in range(40):
            time.sleep(0.01)
            monitor.look()
            told += capsys.readouterr().err.splitlines()
    assert told[0].startswith("waiting on rollout.take since 0 s: no worker owes an answer; stacks are in ")
    assert 2 <= len(told) <= 4  # at 0.05, 0.1, 0.2 and 0.4 s at the earliest
    monitor.look()
    assert capsys.readouterr().err == ""
    log = (tmp_path / "waits.log").read_text()
    assert "driver, MainThread:" in log
    assert "test_a_wait_is_told_when" in log


def test_a_wait_as_long_as_ones_before_is_usual(spans, tmp_path, capsys):
    monitor = looking(spans, tmp_path)
    with spans.phase("rollout", "take"):
        time.sleep(0.2)
    with spans.phase("rollout", "take"):
        time.sleep(0.1)
        monitor.look()
    assert capsys.readouterr().err == ""
    assert spans.longest("rollout", "take") >= 0.2


def test_a_generator_that_works_in_the_background_is_no_wait(spans, tmp_path, capsys):
    monitor = looking(spans, tmp_path)
    with spans.phase("generator", "generate"):
        time.sleep(0.06)
        monitor.look()
    assert capsys.readouterr().err == ""


def test_a_trainer_that_waits_until_a_replica_has_its_weights_is_told_of(spans, tmp_path, capsys):
    sync = WeightSync(TransferSpec("disk", "nowhere", "", 0), spans)
    sync.connect(FakeBackend(), FakeGenerator("a"))
    given, began = threading.Event(), threading.Event()

    def give(spec: TransferSpec | None, proof: Proof | None = None) -> None:
        began.set()
        assert given.wait(60.0)

    coming_back = threading.Thread(target=sync.resync, args=(give,))
    coming_back.start()
    assert began.wait(60.0)
    trainer = threading.Thread(target=sync, kwargs={"version": 1})
    trainer.start()
    monitor = looking(spans, tmp_path)
    time.sleep(0.1)
    monitor.look()
    given.set()
    for thread in (coming_back, trainer):
        thread.join(60.0)
    assert capsys.readouterr().err.startswith("waiting on backend.weight_sync since 0 s")


def test_the_age_of_a_wait_is_not_cut_by_the_end_of_a_step(spans):
    with spans.phase("generator", "generate"):
        before = spans.under_way()
        spans.drain()
        assert spans.under_way() == before
    assert spans.under_way() == []


def test_workers_that_owe_an_answer_are_named_with_what_they_do(spans, tmp_path, capsys):
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        monitor = looking(spans, tmp_path, cluster=cluster)
        with spans.phase("backend", "train"):
            pending = workers.start("hang", phase="train")
            time.sleep(0.3)
            monitor.look()
        told = capsys.readouterr().err
        assert "waiting on backend.train since 0 s: backend-0 train since 0 s (its process computes" in told
        assert "scripted_worker.py" in (tmp_path / "waits.log").read_text()
        assert not pending.done()


def test_episodes_are_told_by_where_they_wait():
    async def sandbox() -> None:
        await asyncio.sleep(1000)

    async def episode() -> None:
        await sandbox()

    async def play() -> None:
        tasks = [asyncio.create_task(episode()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.wait(tasks)

    loop = EpisodeLoop()
    try:
        asyncio.run_coroutine_threadsafe(play(), loop.events)
        deadline = time.monotonic() + 10
        while not any("3 at test_stall_monitor.py" in place and "in sandbox" in place for place in loop.where()):
            assert time.monotonic() < deadline, loop.where()
            time.sleep(0.01)
    finally:
        loop.close()


def test_code_that_keeps_episodes_waiting_is_told_first():
    began, over = threading.Event(), threading.Event()

    async def blocking() -> None:
        began.set()
        over.wait(30)

    loop = EpisodeLoop()
    try:
        done = asyncio.run_coroutine_threadsafe(blocking(), loop.events)
        began.wait(60.0)
        where = loop.where()
        over.set()
        done.result(60.0)
        assert where[0].startswith("running test_stall_monitor.py:")
        assert where[0].endswith(" in blocking, all others wait")
        assert not any(place.startswith("running") for place in loop.where())
    finally:
        loop.close()


def test_the_thread_tells_by_itself_and_ends(spans, tmp_path, capfd):
    monitor = StallMonitor(spans, tmp_path / "waits.log", 0.05)
    with spans.phase("backend", "train"):
        deadline = time.monotonic() + 10
        while not (tmp_path / "waits.log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    monitor.close()
    monitor.close()
    assert "waiting on backend.train" in capfd.readouterr().err
    assert not any(thread.name == "whet-stall-monitor" for thread in threading.enumerate())


def test_switched_off_there_is_no_thread(spans, tmp_path):
    monitor = StallMonitor(spans, tmp_path / "waits.log", 0)
    assert not any(thread.name == "whet-stall-monitor" for thread in threading.enumerate())
    monitor.close()
