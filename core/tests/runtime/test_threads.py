"""Long-lived threads go on after an item that raises, and none ends in silence."""

import ctypes
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.config.sections import DeadlinesSection
from whet.errors import WhetError, WorkerError, WorkerLost
from whet.rollout.event_loop import EpisodeLoop
from whet.runtime.deadlines import DeadlineWatch
from whet.runtime.local import LocalCluster
from whet.runtime.threads import MOST_IN_A_ROW, Guard, watched

TARGET = f"file:{Path(__file__).with_name('losing.py')}:LosingWorker"


def ended(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def end_by_force(name: str) -> None:
    """Raise `SystemExit` in a thread, wherever it is."""
    (thread,) = [one for one in threading.enumerate() if one.name == name]
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def test_an_item_that_raises_is_reported_once_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    done, guard = [], Guard("whet-test", pause_seconds=0.0)

    def run() -> None:
        for number in range(10):
            with guard.item():
                if number % 2:
                    raise ValueError(f"item {number}")
                done.append(number)

    with caplog.at_level(logging.ERROR):
        assert ended(watched("whet-test", run, over=lambda: True))
    assert done == [0, 2, 4, 6, 8]
    (record,) = caplog.records
    assert record.getMessage().startswith("the thread whet-test goes on after an error: ValueError: item 1 (")


def test_a_thread_that_can_only_fail_gives_up_and_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    told, guard, items = list[str](), Guard("whet-test", pause_seconds=0.0), itertools.count(1)

    def run() -> None:
        while True:
            with guard.item():
                raise ValueError(f"item {next(items)}")

    assert ended(watched("whet-test", run, told.append))
    assert next(items) == MOST_IN_A_ROW + 1
    assert told[0].startswith(f"the thread whet-test ended unexpectedly: ValueError: item {MOST_IN_A_ROW} (")
    assert told[0] in capfd.readouterr().err


@pytest.mark.parametrize("may_end", [True, False])
def test_a_thread_that_returns_is_told_unless_it_may(may_end: bool) -> None:
    told = list[str]()
    assert ended(watched("whet-test", lambda: None, told.append, lambda: may_end))
    assert told == ([] if may_end else ["the thread whet-test ended unexpectedly: it returned"])


def test_a_deadline_that_no_clock_can_wait_for_does_not_end_the_clock(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(train=5.0, generate=1e6, heartbeat=0.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        workers.start("hang", 60.0, timeout_seconds=1e30)  # from then on the deadlines thread waits
        pending = workers.start("hang", 60.0, phase="train")
        with pytest.raises(WorkerLost, match=r"no answer within 5 s"):
            pending.result()


class Broken:
    """A connection whose deadlines cannot be told."""

    name, overdue, gone = "broken-0", False, False

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.words = ""

    def next_deadline(self) -> float:
        raise OverflowError("timestamp too large")

    def fail(self, words: str) -> None:
        self.words = words
        self.failed.set()


class Idle:
    """A connection that is watched, and was looked at."""

    name, overdue, gone = "idle-0", False, False

    def __init__(self) -> None:
        self.looked = threading.Event()

    def next_deadline(self) -> float:
        return math.inf if self.looked.is_set() else time.monotonic()

    def end_if_deaf(self) -> None:
        self.looked.set()


def test_the_clock_fails_the_connection_that_it_cannot_watch_and_watches_the_others() -> None:
    lost = list[str]()
    deadline_watch, broken, idle = DeadlineWatch(lost.append), Broken(), Idle()
    deadline_watch.watch(broken)  # type: ignore[arg-type]
    assert broken.failed.wait(30)
    assert broken.words.startswith("its deadlines cannot be watched: OverflowError: timestamp too large")
    deadline_watch.watch(idle)  # type: ignore[arg-type]
    assert idle.looked.wait(30)
    assert not lost
    deadline_watch.stop()


@pytest.mark.parametrize("thread", ["whet-deadlines", "whet-traffic"])
def test_a_thread_of_the_driver_that_is_lost_fails_the_calls_under_way_in_words(
    tmp_path: Path, thread: str, no_longer: Callable[[], None]
) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(train=300.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        pending = workers.start("hang", 300.0, phase="train")
        end_by_force(thread)
        cluster.deadline_watch.watch(cluster.connection("backend-0"))  # the thread runs Python again
        cluster.traffic.order(lambda: None)
        with pytest.raises(WorkerError, match=f"the thread {thread} ended unexpectedly: SystemExit") as raised:
            pending.result()
        assert not isinstance(raised.value, WorkerLost), "another attempt would not know that the driver is at fault"
        with pytest.raises(WorkerError, match="ended unexpectedly"):
            workers.call("add", 1)
    no_longer()


@pytest.fixture
def no_longer() -> Callable[[], None]:
    """Assert that the cluster's threads are over."""

    def check() -> None:
        deadline = time.monotonic() + 30
        while left := {one.name for one in threading.enumerate()} & {"whet-deadlines", "whet-traffic"}:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    return check


@pytest.mark.parametrize("thread", ["whet-heart", "whet-loop", "whet-reader"])
def test_a_thread_of_a_worker_that_is_lost_ends_its_process_and_is_quoted(tmp_path: Path, thread: str) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(train=120.0, heartbeat=60.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        workers.start("lose_thread", thread, phase="train")
        with pytest.raises(WorkerLost) as raised:
            for _ in range(600):  # the thread is lost when it next runs Python
                try:
                    workers.call("touch", phase="train")
                except WorkerLost:
                    raise
                except WorkerError as error:  # it ran a call just then, which failed instead of the thread
                    if "SystemExit" not in str(error):
                        raise
                time.sleep(0.05)
        assert f"the thread {thread} ended unexpectedly: SystemExit" in str(raised.value)


def test_where_the_thread_of_episodes_is_lost_who_waits_for_one_is_told() -> None:
    import asyncio

    loop = EpisodeLoop()

    async def quits() -> None:
        asyncio.get_running_loop().call_soon(exit_now)
        await asyncio.sleep(300)

    def exit_now() -> None:
        raise SystemExit

    with pytest.raises(WhetError, match="the thread whet episodes ended unexpectedly: SystemExit"):
        loop.run(quits())
    loop.close()
