import asyncio
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.component import resolve
from whet.errors import PluginError, Undecided, WhetError
from whet.interfaces.undecided import noted
from whet_sandbox.isolation import landlock
from whet_sandbox.pool import GraderCrash, GraderPool, GraderRaised
from whet_sandbox.process import GraderProcess
from whet_testing.contracts.workers import alive, wait_until

GRADINGS = f"file:{Path(__file__).with_name('gradings.py')}"


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    pool = GraderPool(f"{GRADINGS}:obey", timeout_seconds=5.0)
    yield pool
    pool.close()


def call(pool: GraderPool, *args: Any) -> Any:
    return asyncio.run(pool.call(*args))


def test_builtins_go_in_and_come_out(pool: GraderPool) -> None:
    assert call(pool, "same", "4", "4") is True
    value = {"a": [1, 2.5, None, ("x", b"y")]}
    assert call(pool, "echo", value) == value


def test_many_calls_at_once_from_several_loops_come_back_to_their_callers(pool: GraderPool) -> None:
    results: dict[int, list[Any]] = {}

    async def run(thread: int) -> None:
        results[thread] = await asyncio.gather(*[pool.call("echo", [thread, n]) for n in range(50)])

    threads = [threading.Thread(target=lambda n=n: asyncio.run(run(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert results == {thread: [[thread, n] for n in range(50)] for thread in range(4)}


def test_an_exception_is_told_and_the_grader_lives(pool: GraderPool) -> None:
    pid, crashes = call(pool, "pid"), pool.crashes
    with pytest.raises(GraderRaised, match="obey failed: ValueError: what a mess"):
        call(pool, "fail", "what a mess")
    assert pool.crashes == crashes + 1
    assert call(pool, "pid") == pid


def test_deep_recursion_is_the_answer_s_fault_and_the_grader_lives(pool: GraderPool) -> None:
    pid = call(pool, "pid")
    with pytest.raises(Undecided, match="recurses more than 1000 calls deep"):
        call(pool, "recurse", 100_000)
    assert call(pool, "pid") == pid


@pytest.mark.parametrize("what", ["unsendable", "forge"])
def test_a_result_that_cannot_cross_is_told(pool: GraderPool, what: str) -> None:
    with pytest.raises(GraderRaised, match="WireError"):
        call(pool, what)


def test_a_record_is_not_taken_from_a_grader(pool: GraderPool) -> None:
    with pytest.raises(Undecided, match=r"also alone in a fresh process: it sent no proper answer: .*Sampling"):
        call(pool, "record")


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ([{"~": "repeat", "of": 0, "count": 1 << 20}] * 2000, "holds the packed list 'repeat', which must not cross"),
        ([[]] * 1_000_000, "about 2,000,0.* values, wanted at most 262,144"),
    ],
)
def test_a_short_answer_that_unpacks_to_a_large_one_is_refused(pool: GraderPool, tree: Any, why: str) -> None:
    forged = json.dumps({"value": {"value": tree}, "arrays": []}, separators=(",", ":"))
    tracemalloc.start()
    try:
        with pytest.raises(Undecided, match=why):
            call(pool, "forged", forged)
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 10 * len(forged)
    finally:
        tracemalloc.stop()
    assert call(pool, "same", 1, 1)


@pytest.mark.parametrize(
    ("answer", "why"), [("x" * (1 << 24), "at most 16777216 are taken"), ([0] * 300_000, "wanted at most 262,144")]
)
def test_an_answer_that_is_too_large_is_undecided_and_the_next_call_works(
    pool: GraderPool, answer: Any, why: str
) -> None:
    undecided, crashes = pool.undecided, pool.crashes
    with pytest.raises(Undecided, match=f"also alone in a fresh process: it sent no proper answer: .*{why}"):
        call(pool, "echo", answer)
    assert (pool.undecided, pool.crashes) == (undecided + 1, crashes)
    assert call(pool, "same", 1, 1)


@pytest.mark.parametrize("method", ["receive", "send", "start"])
def test_an_error_of_the_driver_fails_the_call_under_way_and_the_next_call_works(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(grader: GraderProcess, *args: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError("no room")

    async def run(pool: GraderPool, *args: Any) -> Any:
        return await asyncio.wait_for(pool.call(*args), 60.0)

    pool = GraderPool(f"{GRADINGS}:obey")
    try:
        if method != "start":
            call(pool, "same", 1, 1)
        monkeypatch.setattr(GraderProcess, method, fail)
        if method == "start":  # the first try, before there is a call, is forgiven
            assert asyncio.run(run(pool, "echo", 1)) == 1
        else:
            with pytest.raises(GraderCrash, match="MemoryError: no room"):
                asyncio.run(run(pool, "echo", 1))
        assert asyncio.run(run(pool, "echo", 2)) == 2
    finally:
        pool.close()


def test_calls_fail_when_the_thread_that_serves_them_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(grader: GraderProcess, timeout_seconds: float) -> Any:
        raise SystemExit("no more")

    async def run(pool: GraderPool) -> list[Any]:
        calls = [pool.call("echo", "x" * (1 << 15)) for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60.0)

    pool = GraderPool(f"{GRADINGS}:obey")
    try:
        call(pool, "same", 1, 1)
        monkeypatch.setattr(GraderProcess, "receive", fail)
        for results in (asyncio.run(run(pool)), asyncio.run(run(pool))):
            assert [type(result) for result in results] == [GraderCrash] * 3
            assert all("no more" in str(result) for result in results)
    finally:
        pool.close()
    assert "the thread whet-grader-0 ended unexpectedly: SystemExit: no more" in capsys.readouterr().err


def test_an_argument_that_cannot_cross_is_refused(pool: GraderPool) -> None:
    with pytest.raises(WhetError, match=r"the value\[0\] is .*object"):
        call(pool, object())


@pytest.mark.parametrize(
    ("order", "how"),
    [
        (("crash",), "killed by SIGSEGV"),
        (("die", 3, "my last words"), "exited with code 3\nIts last words:\nmy last words"),
        (("memory", 1 << 40), "MemoryError"),
    ],
)
def test_a_call_that_ends_its_process_twice_is_undecided_and_the_next_call_works(
    pool: GraderPool, order: tuple[Any, ...], how: str
) -> None:
    undecided = pool.undecided
    with noted() as reasons, pytest.raises(Undecided, match="also alone in a fresh process: (?s:.*)" + how):
        call(pool, *order)
    assert pool.undecided == undecided + 1
    assert call(pool, "same", 1, 1)
    [reason] = reasons
    assert reason.startswith("the grader file:")
    assert "\n" not in reason


def test_a_call_that_ends_its_process_once_is_answered_by_a_fresh_one(pool: GraderPool) -> None:
    undecided = pool.undecided
    assert call(pool, "die_once", "died") == "answered"
    assert pool.undecided == undecided


def test_a_process_that_is_killed_from_outside_is_the_machinery_s_fault(pool: GraderPool) -> None:
    with pytest.raises(GraderCrash, match="killed by SIGKILL"):
        call(pool, "kill")
    assert call(pool, "same", 1, 1)


def test_nothing_is_noted_where_no_episode_is_under_way(pool: GraderPool) -> None:
    with noted() as reasons:
        pass
    with pytest.raises(Undecided):
        call(pool, "recurse", 100_000)
    assert reasons == []


def test_much_output_neither_blocks_nor_shows(pool: GraderPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(pool, "noise", 1_000_000) == 2_000_000
    assert capfd.readouterr() == ("", "")


def test_nothing_is_written_to_files(pool: GraderPool, tmp_path: Path) -> None:
    with pytest.raises(GraderRaised, match="File too large"):
        call(pool, "write", "x")
    with pytest.raises(GraderRaised, match=r"File too large|Permission denied"):
        call(pool, "write", str(tmp_path / "x"))


def test_a_grader_is_shut_in(pool: GraderPool, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    abi = landlock.version()
    orders = (("read", str(tmp_path / "secret")),) * (abi >= 1) + (("signal", os.getpid()),) * (abi >= 6)
    for order in orders:
        with pytest.raises(GraderRaised, match="PermissionError"):
            call(pool, *order)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(GraderRaised, match="not permitted"):
        call(pool, "connect", server.getsockname()[1])


@pytest.mark.usefixtures("no_orphans")
def test_a_grader_that_needs_more_is_not_shut_in(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("data")
    pool = GraderPool(f"{GRADINGS}:obey", confined=False)
    try:
        assert call(pool, "read", str(tmp_path / "data")) == "data"
    finally:
        pool.close()


def test_open_files_are_few(pool: GraderPool) -> None:
    with pytest.raises(GraderRaised, match="Too many open files"):
        call(pool, "files", 100)


def test_the_environment_is_stripped(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    with pytest.raises(Undecided):
        call(pool, "die", 1, "so that another one starts")
    assert "SECRET_TOKEN" not in call(pool, "environment")


def test_the_folder_is_empty_and_not_the_driver_s(pool: GraderPool) -> None:
    folder, files = call(pool, "folder")
    assert folder != os.getcwd()
    assert files == []


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("order", "patience", "how", "starts"),
    [
        (("spin",), 200, r"it needs more than 0\.3 s of processor time", 1),
        (("sleep", 1000.0), 10, r"also alone in a fresh process: no answer within 3 s", 2),
    ],
    ids=["processor", "clock"],
)
def test_a_late_call_is_killed_and_the_next_one_works(
    order: tuple[Any, ...], patience: int, how: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet_sandbox.pool._PATIENCE", patience)  # 0.3 s may last long on a busy machine
    pool = GraderPool(f"{GRADINGS}:obey", timeout_seconds=0.3)
    try:
        call(pool, "same", 1, 1)
        started: list[GraderProcess] = []
        start = GraderProcess.start

        def counted(grader: GraderProcess) -> None:
            started.append(grader)
            start(grader)

        monkeypatch.setattr(GraderProcess, "start", counted)
        with pytest.raises(Undecided, match=f"obey cannot decide about an answer: {how}"):
            call(pool, *order)
        assert (pool.undecided, pool.crashes) == (1, 0)
        assert call(pool, "same", 1, 1)
        assert len(started) == starts
    finally:
        pool.close()


@pytest.mark.usefixtures("no_orphans")
def test_time_in_which_the_processor_is_busy_elsewhere_does_not_count() -> None:
    """Stopped for longer than its limit, as on a machine with too much to do, a call is answered all the same."""
    pool = GraderPool(f"{GRADINGS}:obey", timeout_seconds=0.3)
    try:
        assert call(pool, "stop", 1.0) == "answered"
        assert pool.undecided == 0
    finally:
        pool.close()


def test_calls_behind_a_late_or_crashing_one_are_not_lost(pool: GraderPool) -> None:
    async def run() -> list[Any]:
        orders = [("echo", 0), ("die", 1, ""), ("echo", 1), ("fail", ""), ("echo", 2)]
        return await asyncio.gather(*[pool.call(*order) for order in orders], return_exceptions=True)

    results = asyncio.run(run())
    assert [results[i] for i in (0, 2, 4)] == [0, 1, 2]
    assert isinstance(results[1], Undecided)
    assert isinstance(results[3], GraderRaised)


def test_answers_given_before_a_crash_count_also_while_more_is_sent(
    pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(grader: GraderProcess, buffers: Any, timeout_seconds: float) -> None:
        time.sleep(0.3)  # so that it is dead before all is sent
        send(grader, buffers, timeout_seconds)

    async def run() -> list[Any]:
        await pool.call("echo", 0)
        monkeypatch.setattr(GraderProcess, "send", slowly)
        orders = [("echo", 0), ("die", 1, ""), ("echo", 1), ("echo", 2)]
        return await asyncio.gather(*[pool.call(*order) for order in orders], return_exceptions=True)

    send = GraderProcess.send
    first, second, *rest = asyncio.run(run())
    assert (first, type(second), rest) == (0, Undecided, [1, 2])


def test_a_cancelled_call_does_not_disturb_others(pool: GraderPool) -> None:
    async def run() -> Any:
        cancelled = [asyncio.create_task(pool.call("sleep", 0.05)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in cancelled:
            task.cancel()
        return await pool.call("echo", 1)

    assert asyncio.run(run()) == 1


@pytest.mark.usefixtures("no_orphans")
def test_several_workers_work_at_one_time() -> None:
    pool = GraderPool(f"{GRADINGS}:obey", workers=2, timeout_seconds=30.0)
    try:

        async def run() -> list[bool]:
            one, other = "one", "other"
            return await asyncio.gather(pool.call("meet", one, other), pool.call("meet", other, one))

        assert asyncio.run(run()) == [True, True]
    finally:
        pool.close()


@pytest.mark.usefixtures("no_orphans")
def test_with_a_setup_the_target_makes_the_function() -> None:
    pool = GraderPool(f"{GRADINGS}:multiply", setup={"factor": 3})
    try:
        assert call(pool, 4) == 12
    finally:
        pool.close()


@pytest.mark.usefixtures("no_orphans")
def test_the_target_may_be_a_function_also_of_a_single_file() -> None:
    for function in (math.factorial, resolve(f"{GRADINGS}:factorial")):
        pool = GraderPool(function)
        try:
            assert call(pool, 5) == 120
        finally:
            pool.close()
    with pytest.raises(PluginError, match="is made inside a function"):
        GraderPool(lambda: 1)


@pytest.mark.usefixtures("no_orphans")
def test_a_grader_that_cannot_be_imported_fails_every_call_with_the_reason() -> None:
    pool = GraderPool("no_such_module:grade")
    try:
        for _ in range(2):
            with pytest.raises(GraderCrash, match=r"could not be started: .*no_such_module") as caught:
                call(pool, 1)
            assert "Traceback" not in str(caught.value)
    finally:
        pool.close()


@pytest.mark.usefixtures("no_orphans")
def test_a_grader_that_does_not_get_ready_fails_at_its_deadline() -> None:
    pool = GraderPool(f"{GRADINGS}:slowly_made", setup={}, start_seconds=0.5)
    try:
        with pytest.raises(GraderCrash, match=r"not ready within 0\.5 s"):
            call(pool)
    finally:
        pool.close()


@pytest.mark.usefixtures("no_orphans")
def test_close_ends_graders_and_what_they_started_and_fails_calls_under_way() -> None:
    pool = GraderPool(f"{GRADINGS}:obey")
    pids = [call(pool, "pid"), *call(pool, "children")]

    async def run() -> None:
        waiting = [asyncio.create_task(pool.call("sleep", 1000.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        await asyncio.to_thread(pool.close)
        assert time.monotonic() - begin < 20.0
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, WhetError)
            assert "closed" in str(result)

    asyncio.run(run())
    wait_until(lambda: not any(map(alive, pids)), "the grader and its children are gone")
    pool.close()
    with pytest.raises(WhetError, match="closed"):
        call(pool, "same", 1, 1)


@pytest.mark.usefixtures("no_orphans")
def test_a_pool_that_was_never_used_starts_nothing() -> None:
    GraderPool(f"{GRADINGS}:obey").close()


DRIVER = """
import asyncio, os, sys, time
from whet_sandbox.isolation import landlock
from whet_sandbox.pool import GraderPool

graders = GraderPool("os:getpid")
print(asyncio.run(graders.call()), flush=True)
if sys.argv[1] == "raise":
    raise SystemExit("the driver ends without closing anything")
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "raise"])
def test_no_grader_outlives_its_driver_however_it_ends(tmp_path: Path, how: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert driver.stdout is not None
    with driver.stdout:
        pid = int(driver.stdout.readline())
        assert alive(pid) or how == "raise"
        if how != "raise":
            driver.send_signal(signal.Signals[how])
        driver.wait(10.0)
    wait_until(lambda: not alive(pid), "the grader is gone")
    wait_until(lambda: not list(tmp_path.glob("whet-*")), "its folder is gone")


def test_the_path_in_core_leads_here_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.runtime\.pool has moved to whet_sandbox\.pool"):
        old = importlib.import_module("whet.runtime.pool")
    assert old.GraderPool is GraderPool
