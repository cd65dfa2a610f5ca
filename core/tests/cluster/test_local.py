import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from whet.cluster.local import LocalCluster
from whet.cluster.slices import Slice
from whet.config.sections import DeadlinesSection
from whet.errors import ConfigError, WorkerError
from whet.testing.contracts.workers import ProcessWorkersContract, alive, collect, wait_until
from whet.testing.obedient import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")


class TestLocal(ProcessWorkersContract):
    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], Slice]]:
        with LocalCluster(folder) as cluster:
            yield cluster.slice


def test_roles_that_share_live_in_one_process_and_on_one_thread(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        backend, generator, other = cluster.slice("backend", 2), cluster.slice("generator"), cluster.slice("critic")
        assert generator.host_groups == backend.host_groups[:1]
        assert not set(other.host_groups) & set(backend.host_groups)
        first, second = backend.spawn(TARGET, {}), generator.spawn(TARGET, {})
        assert second.call("state")[0]["pid"] == first.call("state")[0]["pid"]
        assert second.call("remember", 0)[0] == first.call("remember", 0)[0]
        first.close()
        assert second.call("add", 1) == [1]


def test_closing_one_of_two_roles_in_a_process_ends_its_streams(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        first, second = cluster.slice("backend").spawn(TARGET, {}), cluster.slice("generator").spawn(TARGET, {})
        threading.Timer(0.2, second.close).start()
        with pytest.raises(WorkerError, match="generator rank 0 failed in count: it was cancelled"):
            collect(second.stream(0, "count", 2, -1, 1000.0))
        assert first.call("add", 1) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_live_through_signals_that_a_job_manager_sends_to_all_processes(tmp_path: Path, number: int) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        os.kill(workers.call("state")[0]["pid"], number)
        assert workers.call("add", 1) == [1]


def test_output_goes_to_the_log_of_the_role_and_of_those_that_share(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        cluster.slice("generator").spawn(TARGET, {}).close()
        workers = cluster.slice("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match=r"backend-0\.log"):
            workers.call("fail", (0,), "quoted in the log")
    assert "quoted in the log" in (tmp_path / "backend-0.log").read_text()
    assert (tmp_path / "generator-0.log").samefile(tmp_path / "backend-0.log")


def test_a_failure_is_heard_of_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, whose disk is always full")
    (tmp_path / "backend-0.log").symlink_to("/dev/full")
    with LocalCluster(tmp_path, DeadlinesSection(train=20.0)) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match="said all the same"):
            workers.call("fail", (0,), "said all the same", phase="train")
        assert workers.call("add", 1) == [1]


def test_the_environment_says_threads_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with LocalCluster(tmp_path, environment={"MARK": "x"}) as cluster:
        gpus = cluster.slice("backend", 2, threads=3, device=["cuda:0", "cuda:2"]).spawn(TARGET, {})
        cpu = cluster.slice("generator").spawn(TARGET, {})
        assert [place.device for place in gpus.call("place")] == ["cuda:0", "cuda:0"]
        assert [e["CUDA_VISIBLE_DEVICES"] for e in gpus.call("environment")] == ["4", "6"]
        environment = gpus.call("environment")[0]
        assert [environment[k] for k in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MARK")] == ["3", "PASSIVE", "x"]
        assert cpu.call("environment")[0]["CUDA_VISIBLE_DEVICES"] == ""
        assert cpu.call("place")[0].device == "cpu"


def test_roles_that_share_a_process_cannot_have_two_gpus(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        cluster.slice("backend", device=["cuda:0"])
        with pytest.raises(ConfigError, match="backend cuda:0, generator cuda:1"):
            cluster.slice("generator", device=["cuda:1"])


def test_a_phase_has_the_deadline_that_is_configured(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(train=0.2)) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match=r"failed in train: no answer within 0\.2 s"):
            workers.call("hang", phase="train")


def test_a_missed_deadline_shows_where_the_worker_hangs(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("hang", timeout_seconds=0.2)
    assert "in hang" in caught.value.last_words


def test_of_ranks_that_miss_a_deadline_the_one_that_stands_still_is_named(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend", 3).spawn(TARGET, {})
        os.kill(workers.call("state")[1]["pid"], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank 1 failed in hang: .* its process is stopped"):
            workers.call("hang", timeout_seconds=0.3)


def test_a_rank_that_died_is_named_rather_than_one_that_noticed(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend", 2).spawn(TARGET, {})
        with pytest.raises(WorkerError, match="rank 1 failed in fail_or_die: its process exited with code 3") as caught:
            workers.call("fail_or_die", 0)
        assert "rank 0 failed in fail_or_die: ConnectionError" in str(caught.value.__cause__)


def test_a_missed_deadline_shows_where_every_rank_hangs(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend", 2).spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("hang", timeout_seconds=0.3)
    assert [line for line in caught.value.last_words.splitlines() if line.startswith("backend-")] == [
        "backend-0:",
        "backend-1:",
    ]
    assert caught.value.last_words.count("in hang") == 2


def test_a_stream_s_deadline_is_for_each_item(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(generate=0.5)) as cluster:
        workers = cluster.slice("generator").spawn(TARGET, {})
        assert len(collect(workers.stream(0, "count", 8, -1, 0.1, phase="generate"))) == 8
        with pytest.raises(WorkerError, match=r"failed in generate: no answer within 0\.5 s"):
            collect(workers.stream(0, "hang_in_stream", phase="generate"))


def test_a_constructor_that_hangs_misses_the_deadline_of_the_start(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path, DeadlinesSection(start=0.3)) as cluster,
        pytest.raises(WorkerError, match=r"failed in start: no answer within 0\.3 s"),
    ):
        cluster.slice("backend").spawn(TARGET, {"hang": True})


def test_a_role_can_be_spawned_again_after_its_process_died(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        part = cluster.slice("backend")
        workers = part.spawn(TARGET, {})
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            workers.call("die", signal.SIGKILL)
        workers.close()
        assert part.spawn(TARGET, {}).call("add", 1) == [1]


def test_what_could_steer_a_terminal_is_not_quoted_as_it_is(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("die", -4, "\x1b]0;owned\x07 red")
    assert "\x1b" not in str(caught.value)
    assert "owned" in str(caught.value)
    assert "exited with code 4" in caught.value.cause


def test_warm_processes_have_imported_before_they_are_asked(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        part = cluster.slice("backend")
        cluster.warm([part], ["wave", "no_such_module"])
        pid = part.spawn(TARGET, {}).call("state")[0]["pid"]
        assert pid == cluster.connection("backend-0").pid


def test_warm_processes_that_nobody_used_are_ended(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        cluster.warm([cluster.slice("backend")])
        pid = cluster.connection("backend-0").pid
        assert alive(pid)
    assert not alive(pid)


def test_a_closed_cluster_starts_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    part = cluster.slice("backend")
    cluster.close()
    cluster.close()
    with pytest.raises(WorkerError, match="closed"):
        part.spawn(TARGET, {})


def test_workers_open_when_the_cluster_closes_are_closed(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        cluster.slice("backend").spawn(TARGET, {"trace": str(tmp_path)})
    assert (tmp_path / "closed-backend-0").exists()


def test_a_child_in_a_session_of_its_own_ends_with_its_worker(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.slice("backend").spawn(TARGET, {})
        children = workers.call("start_child") + workers.call("start_child", True)
        with pytest.raises(WorkerError):
            workers.call("die", signal.SIGKILL)
        wait_until(lambda: not any(map(alive, children)), "the children are gone")


DRIVER = """
import asyncio, os, sys, time
from pathlib import Path
from whet.cluster.local import LocalCluster
from whet.cluster.pool import GraderPool
from whet.testing.obedient import TARGET

cluster = LocalCluster(Path(sys.argv[1]))
workers = cluster.slice("backend", 2).spawn(TARGET, {})
pids = [state["pid"] for state in workers.call("state")]
pids += workers.call("start_child") + workers.call("start_child", True)
graders = GraderPool("os:getpid")
pids.append(asyncio.run(graders.call()))
hanging = workers.start("hang")
print(*pids, flush=True)
if sys.argv[2] == "raise":
    raise SystemExit("the driver ends without closing anything")
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "raise"])
def test_nothing_outlives_a_driver_however_it_ends(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path), how]
    driver = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert driver.stdout is not None
    with driver.stdout:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 7
        assert all(map(alive, pids)) or how == "raise"
        if how != "raise":
            driver.send_signal(signal.Signals[how])
        driver.wait(10.0)
    wait_until(lambda: not any(map(alive, pids)), "the workers and their children are gone")
    wait_until(lambda: not list(tmp_path.glob("whet-*")), "temporary folders are gone")


def test_a_worker_stopped_when_the_driver_is_killed_ends_too(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), ""], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(0.05)
        driver.kill()
        driver.wait(10.0)
    wait_until(lambda: not any(map(alive, pids)), "the workers and their children are gone")
