"""Work in the background goes on alone, and is never lost sight of."""

import threading
import time

import pytest

from whet.errors import WorkerError
from whet.run.background import Background


def test_the_caller_goes_on_until_it_waits():
    background, go, done = Background(), threading.Event(), []
    background.start(lambda: done.append(go.wait(60.0)), time.perf_counter())
    assert background.busy
    background.check()
    assert not done
    go.set()
    background.wait()
    assert done == [True]
    assert not background.busy


def test_there_is_one_work_at_a_time():
    background, order, go = Background(), [], threading.Event()

    def first():
        go.wait(60.0)
        order.append("first")

    background.start(first, time.perf_counter())
    threading.Timer(0.05, go.set).start()
    background.start(lambda: order.append("second"), time.perf_counter())
    assert order[0] == "first"
    background.wait()
    assert order == ["first", "second"]


def test_an_error_is_raised_once_by_whatever_asks_next():
    def fail():
        raise WorkerError("backend", 1, "save", "the disk is full")

    background = Background()
    background.start(fail, time.perf_counter())
    while background.busy:
        time.sleep(0.001)
    with pytest.raises(WorkerError, match=r"(?s)backend.*1.*save.*the disk is full"):
        background.check()
    background.check()
    background.wait()
    assert background.longest == 0.0


def test_the_longest_work_counts_from_its_beginning_as_a_whole():
    background = Background()
    background.start(lambda: None, time.perf_counter() - 7.0)
    background.wait()
    background.start(lambda: None, time.perf_counter())
    background.wait()
    assert 7.0 <= background.longest < 10.0
