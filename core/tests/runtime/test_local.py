import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rich

import whet
from whet.config.sections import DeadlinesSection
from whet.errors import ConfigError, WorkerError, WorkerLost
from whet.interfaces.workers import WorkerGroup
from whet.runtime import WIRE_FORMAT
from whet.runtime.channel import Line, send
from whet.runtime.connection import Call, Connection, end_all
from whet.runtime.deadlines import DeadlineWatch
from whet.runtime.local import LocalCluster, LocalProcess
from whet.runtime.traffic import Traffic
from whet.runtime.wire import encode
from whet_testing.contracts.workers import ProcessWorkersContract, alive, collect, wait_until
from whet_testing.environments import make_environment
from whet_testing.scripted_worker import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")


class TestLocal(ProcessWorkersContract):
    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], WorkerGroup]]:
        with LocalCluster(folder) as cluster:
            yield cluster.worker_group


def test_roles_that_share_live_in_one_process_and_on_one_thread(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        backend, generator, other = (
            cluster.worker_group("backend", 2),
            cluster.worker_group("generator"),
            cluster.worker_group("critic"),
        )
        assert generator.host_groups == backend.host_groups[:1]
        assert not set(other.host_groups) & set(backend.host_groups)
        first, second = backend.spawn(TARGET, {}), generator.spawn(TARGET, {})
        assert second.call("state")[0]["pid"] == first.call("state")[0]["pid"]
        assert second.call("remember", 0)[0] == first.call("remember", 0)[0]
        first.close()
        assert second.call("add", 1) == [1]


KNOT = """
import weakref
from pathlib import Path

class Worker:
    def __init__(self, rank, freed):
        self.knot = self
        weakref.finalize(self, Path(freed).touch)
"""


def test_what_a_closed_worker_held_is_freed_for_the_others_of_its_process(tmp_path: Path) -> None:
    (tmp_path / "knot.py").write_text(KNOT)
    with LocalCluster(tmp_path / "logs", share=[["backend", "generator"]]) as cluster:
        backend, generator = cluster.worker_group("backend"), cluster.worker_group("generator")
        other = generator.spawn(TARGET, {})
        first = backend.spawn(f"file:{tmp_path / 'knot.py'}:Worker", {"freed": str(tmp_path / "freed")})
        assert not (tmp_path / "freed").exists()
        first.close()
        assert other.call("add", 1) == [1]
        assert (tmp_path / "freed").exists()


def test_closing_one_of_two_roles_in_a_process_ends_its_streams(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        first, second = (
            cluster.worker_group("backend").spawn(TARGET, {}),
            cluster.worker_group("generator").spawn(TARGET, {}),
        )
        threading.Timer(0.2, second.close).start()
        with pytest.raises(WorkerError, match="generator rank 0 failed in count: it was cancelled"):
            collect(second.stream(0, "count", 2, -1, 1000.0))
        assert first.call("add", 1) == [1]


BUILT_ONCE = """
from pathlib import Path

class Worker:
    def __init__(self, rank, built):
        Path(built).mkdir()

    def add(self, value): ...
    async def count(self): yield 1
"""


def test_calls_of_a_worker_whose_build_failed_are_told_so_and_leave_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(BUILT_ONCE)
    with LocalCluster(tmp_path / "logs") as cluster:
        workers = cluster.worker_group("backend")
        workers = workers.spawn(f"file:{tmp_path / 'once.py'}:Worker", {"built": str(tmp_path / "built")})
        with pytest.raises(WorkerError, match="FileExistsError"):
            workers.restart(0)
        with pytest.raises(WorkerError, match=r"there is no worker for add: its build .* failed"):
            workers.call("add", 1)
        with pytest.raises(WorkerError, match="there is no worker for count"):
            collect(workers.stream(0, "count"))
    log = (tmp_path / "logs" / "backend-0.log").read_text()
    assert log.count("Traceback") == 1, log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_live_through_signals_that_a_job_manager_sends_to_all_processes(tmp_path: Path, number: int) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        os.kill(workers.call("state")[0]["pid"], number)
        assert workers.call("add", 1) == [1]


def test_output_goes_to_the_log_of_the_role_and_of_those_that_share(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        cluster.worker_group("generator").spawn(TARGET, {}).close()
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match=r"backend-0\.log"):
            workers.call("fail", (0,), "quoted in the log")
    assert "quoted in the log" in (tmp_path / "backend-0.log").read_text()
    assert (tmp_path / "generator-0.log").samefile(tmp_path / "backend-0.log")


def test_a_failure_is_heard_of_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, whose disk is always full")
    (tmp_path / "backend-0.log").symlink_to("/dev/full")
    with LocalCluster(tmp_path, DeadlinesSection(train=20.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match="said all the same"):
            workers.call("fail", (0,), "said all the same", phase="train")
        assert workers.call("add", 1) == [1]


def test_the_environment_says_threads_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with LocalCluster(tmp_path, environment={"MARK": "x"}) as cluster:
        gpus = cluster.worker_group("backend", 2, threads=3, device=["cuda:0", "cuda:1,2"]).spawn(TARGET, {})
        cpu = cluster.worker_group("generator").spawn(TARGET, {})
        assert [place.device for place in gpus.call("place")] == ["cuda:0", "cuda:0,1"]
        assert [e["CUDA_VISIBLE_DEVICES"] for e in gpus.call("environment")] == ["4", "5,6"]
        environment = gpus.call("environment")[0]
        assert [environment[k] for k in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MARK")] == ["3", "PASSIVE", "x"]
        assert cpu.call("environment")[0]["CUDA_VISIBLE_DEVICES"] == ""
        assert cpu.call("place")[0].device == "cpu"


def test_an_engine_on_two_gpus_sees_those_of_two_ranks_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with LocalCluster(tmp_path) as cluster:
        backend = cluster.worker_group("backend", 4, device=[f"cuda:{gpu}" for gpu in range(4)])
        generator = cluster.worker_group("generator", 2, device=["cuda:0,1", "cuda:2,3"])
        found = [part.spawn(TARGET, {}).call("environment") for part in (backend, generator)]
    seen = [[environment["CUDA_VISIBLE_DEVICES"] for environment in each] for each in found]
    assert seen == [["4", "5", "6", "7"], ["4,5", "6,7"]]


def test_roles_that_share_a_process_cannot_have_two_gpus(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]]) as cluster:
        cluster.worker_group("backend", device=["cuda:0"])
        with pytest.raises(ConfigError, match="backend cuda:0, generator cuda:1"):
            cluster.worker_group("generator", device=["cuda:1"])


SINGLE_FILE = """
import sys

class Worker:
    def __init__(self, rank):
        pass

    def where(self):
        return sys.executable
"""


def test_a_role_runs_in_a_python_of_its_own_and_sees_nothing_that_is_installed_in_the_driver_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"rich.py": "", "only_there.py": ""}
    python = str(make_environment(tmp_path / "other", without=["rich", "pluggy"], also=own))
    site = next((tmp_path / "other").glob("lib/python*/site-packages"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside_the_script.py").write_text(SINGLE_FILE)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    with LocalCluster(tmp_path / "logs", python={"generator": python}) as cluster:
        here, there = (cluster.worker_group(role).spawn(TARGET, {}) for role in ("backend", "generator"))
        assert here.call("imported", "rich") == [(rich.__file__, sys.executable)]
        assert there.call("imported", "rich") == [(f"{site}/rich.py", python)], "another version of it"
        assert there.call("imported", "only_there") == [(f"{site}/only_there.py", python)]
        assert there.call("imported", "beside_the_script")[0][0] == f"{tmp_path}/mine/beside_the_script.py"
        single = cluster.worker_group("generator").spawn(f"file:{tmp_path}/mine/beside_the_script.py:Worker", {})
        assert single.call("where") == [python]
        with pytest.raises(WorkerError, match="generator rank 0 failed in imported: ModuleNotFoundError"):
            there.call("imported", "pluggy")
        environment = there.call("environment")[0]
        assert environment["VIRTUAL_ENV"] == f"{tmp_path}/other"
        assert environment["PATH"].startswith(f"{tmp_path}/other/bin:")


def test_a_worker_whose_core_is_another_ends_at_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.runtime.launcher.WIRE_FORMAT", 77)
    with LocalCluster(tmp_path) as cluster, pytest.raises(WorkerLost) as caught:
        cluster.worker_group("generator").spawn(TARGET, {})
    assert f"{sys.executable} has whet {whet.__version__} (wire format {WIRE_FORMAT}), and the driver whet" in str(
        caught.value
    )
    assert "(wire format 77); install the same in both" in str(caught.value)


def test_roles_that_share_a_process_cannot_have_two_pythons(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, share=[["backend", "generator"]], python={"generator": "/x/python"}) as cluster:
        cluster.worker_group("backend")
        with pytest.raises(ConfigError, match="must share its Python, found backend the driver, generator /x/python"):
            cluster.worker_group("generator")


def test_a_phase_has_the_deadline_that_is_configured(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(train=0.2)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError, match=r"failed in train: no answer within 0\.2 s"):
            workers.call("hang", phase="train")


def test_a_missed_deadline_shows_where_the_worker_hangs(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("hang", timeout_seconds=0.2)
    assert "in hang" in caught.value.last_words


def test_of_ranks_that_miss_a_deadline_the_one_that_stands_still_is_named(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 3).spawn(TARGET, {})
        os.kill(workers.call("state")[1]["pid"], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank 1 failed in hang: .* its process is stopped"):
            workers.call("hang", timeout_seconds=0.3)


def test_a_rank_that_died_is_named_rather_than_one_that_noticed(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
        with pytest.raises(WorkerError, match="rank 1 failed in fail_or_die: its process exited with code 3") as caught:
            workers.call("fail_or_die", 0)
        assert "rank 0 failed in fail_or_die: ConnectionError" in str(caught.value.__cause__)


def test_deadlines_are_kept_also_where_stacks_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: LocalProcess) -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(LocalProcess, "show_stacks", refuse)
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        for _ in range(2):
            with pytest.raises(WorkerError, match="no answer within"):
                workers.call("hang", timeout_seconds=0.2)
            workers.restart(0)


def test_a_missed_deadline_shows_where_every_rank_hangs(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("hang", timeout_seconds=0.3)
    assert [line for line in caught.value.last_words.splitlines() if line.startswith("backend-")] == [
        "backend-0:",
        "backend-1:",
    ]
    assert caught.value.last_words.count("in hang") == 2


def test_a_stream_s_deadline_is_for_each_item(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(generate=0.5)) as cluster:
        workers = cluster.worker_group("generator").spawn(TARGET, {})
        assert len(collect(workers.stream(0, "count", 8, -1, 0.1, phase="generate"))) == 8
        with pytest.raises(WorkerError, match=r"failed in generate: no answer within 0\.5 s"):
            collect(workers.stream(0, "hang_in_stream", phase="generate"))


def test_a_constructor_that_hangs_misses_the_deadline_of_the_start(tmp_path: Path) -> None:
    with (
        LocalCluster(tmp_path, DeadlinesSection(start=0.3)) as cluster,
        pytest.raises(WorkerError, match=r"failed in start: no answer within 0\.3 s"),
    ):
        cluster.worker_group("backend").spawn(TARGET, {"hang": True})


def test_a_process_that_stands_still_is_found_long_before_its_deadline(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(heartbeat=1.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        pid = workers.call("state")[0]["pid"]
        pending = workers.start("hang", phase="train")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            WorkerLost, match="backend rank 0 failed in train: no sign of life for 1 s; its process is stopped"
        ):
            pending.result()
        wait_until(lambda: not alive(pid), "the process is gone")


def test_a_process_that_stands_still_while_nobody_waits_is_found_too(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(heartbeat=1.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        pid = workers.call("state")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not alive(pid), "the process is gone")
        with pytest.raises(WorkerLost, match="rank 0 failed in add: its process gave no sign of life for 1 s"):
            workers.call("add", 1)


def test_a_stream_is_of_the_process_that_the_rank_had_when_it_was_asked_for(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("generator").spawn(TARGET, {})
        early = workers.stream(0, "count", 3, phase="generate")
        workers.restart(0)
        with pytest.raises(WorkerLost, match=r"rank 0 failed in generate: its process was ended because .*anew"):
            collect(early)
        assert len(collect(workers.stream(0, "count", 3))) == 3


class SlowLine:
    """Stands for a process at the end of a slow network: an answer of 20 parts, each a moment after the last."""

    pid = 0
    node = ""

    def line(self, *ends: Any) -> Line:
        return Line(*ends)

    def start(self) -> socket.socket:
        here, self._there = socket.socketpair()
        return here

    def wait(self) -> str:
        alive = encode({"number": 0, "say": "alive", "value": {"doing": "", "seconds": 0.0}})
        send(self._there, alive)
        near, far = socket.socketpair()
        with far:
            answer = encode({"number": 7, "say": "done", "value": bytes(1 << 20)})
            sending = threading.Thread(target=lambda: (send(near, answer), near.close()))
            sending.start()
            while part := far.recv((1 << 20) // 20, socket.MSG_WAITALL):
                time.sleep(0.1)
                self._there.sendall(part)
            sending.join()
        self._ended.wait(10)
        return "it was told to end"

    def __init__(self) -> None:
        self._ended = threading.Event()

    def kill(self) -> None:
        self._ended.set()

    def state(self) -> str:
        return ""

    def show_stacks(self) -> None:
        """Nothing can be shown."""


def test_an_answer_that_takes_longer_to_come_than_silence_may_last_is_not_silence(tmp_path: Path) -> None:
    deadline_watch, traffic, answer = DeadlineWatch(), Traffic(), Future[object]()
    connection = Connection("backend-0", tmp_path / "log", SlowLine(), deadline_watch.alarm, traffic)
    deadline_watch.watch(connection)
    call = Call("backend", 0, "score", 30.0, lambda value, error: answer.set_result(error or value))
    connection.expect_heartbeats(0.8)
    connection.ask(7, encode({}), call)
    assert answer.result(30) == bytes(1 << 20)
    end_all([connection], time.monotonic())
    deadline_watch.stop()
    traffic.stop()


def test_a_busy_process_is_not_silent_and_says_what_it_does(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, DeadlinesSection(heartbeat=2.0)) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        assert cluster.under_way() == []
        pending = workers.start("hang", 3.5, phase="train")
        wait_until(lambda: cluster.under_way()[0].doing == "hang", "it says what it does")
        (found,) = cluster.under_way()
        assert re.match(
            r"backend-0 train since \d s \(its process computes hang since \d s, heard of \d s ago\)", str(found)
        )
        assert "in hang" in cluster.stacks()["backend-0"]
        assert pending.result() == [None]
        assert cluster.under_way() == []


SLEEPER = """
import os, pathlib, signal, sys, threading, time
from whet.runtime.local import LocalCluster
from whet.config.sections import DeadlinesSection
with LocalCluster(pathlib.Path(sys.argv[1]), DeadlinesSection(heartbeat=1.5)) as cluster:
    workers = cluster.worker_group("backend").spawn("whet_testing.scripted_worker:ObedientWorker", {})
    time.sleep(0.5)
    print("ready", flush=True)
    sys.stdin.readline()
    time.sleep(0.5)
    print(workers.call("add", 1), flush=True)
"""


def test_a_driver_that_stood_still_does_not_blame_its_workers(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate("go\n", timeout=30)
    assert output == "[1]\n"


@pytest.mark.parametrize(
    ("method", "cause"),
    [
        ("hang_up", "its process closed the connection to the driver"),
        ("babble", "its process sent no proper answer: a message is damaged"),
    ],
)
def test_a_process_that_lives_on_without_its_connection_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, cause: str
) -> None:
    monkeypatch.setattr("whet.runtime.connection._PATIENCE_FOR_AN_END", 0.2)
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(f"file:{Path(__file__).with_name('rude.py')}:RudeWorker", {})
        pids = workers.call("pid")
        with pytest.raises(WorkerLost, match=f"rank 1 failed in {method}: {cause}"):
            workers.start_on(1, method).result()
        wait_until(lambda: not alive(pids[1]), "the process is gone")
        assert workers.start_on(0, "pid").result() == pids[:1]


def test_the_loss_of_a_process_is_known_to_who_only_saw_its_effect(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
        others = cluster.worker_group("generator").spawn(TARGET, {})
        os.kill(workers.call("state")[1]["pid"], signal.SIGKILL)
        found = cluster.loss("backend", "weight_sync")
        assert isinstance(found, WorkerLost)
        assert re.match("backend rank 1 failed in weight_sync: its process was killed by SIGKILL", str(found))
        assert cluster.loss("generator", "weight_sync") is None
        assert others.call("state")


def test_a_role_can_be_spawned_again_after_its_process_died(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        part = cluster.worker_group("backend")
        workers = part.spawn(TARGET, {})
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            workers.call("die", signal.SIGKILL)
        workers.close()
        assert part.spawn(TARGET, {}).call("add", 1) == [1]


def test_a_missed_deadline_does_not_end_the_process_that_took_the_place_since(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        restarted = threading.Event()

        def restart(failed: object) -> None:
            workers.restart(0)
            restarted.set()

        pending = workers.start_on(0, "hang", timeout_seconds=0.3)
        pending._answers.when(0, restart)  # runs before whoever failed the call goes on
        with pytest.raises(WorkerLost, match=r"no answer within 0\.3 s"):
            pending.result()
        assert restarted.wait(30)
        with pytest.raises(WorkerLost, match=r"no answer within 0\.3 s"):  # the same thread has finished by then
            cluster.worker_group("other").spawn(TARGET, {}).call("hang", timeout_seconds=0.3)
        assert workers.call("add", 1) == [1]


def test_what_could_steer_a_terminal_is_not_quoted_as_it_is(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("die", -4, "\x1b]0;owned\x07 red")
    assert "\x1b" not in str(caught.value)
    assert "owned" in str(caught.value)
    assert "exited with code 4" in caught.value.cause


def test_warm_processes_have_imported_before_they_are_asked(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        part = cluster.worker_group("backend")
        cluster.warm({"backend": ["wave", "no_such_module"]})
        pid = part.spawn(TARGET, {}).call("state")[0]["pid"]
        assert pid == cluster.connection("backend-0").pid


def test_warm_processes_that_nobody_used_are_ended(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        cluster.worker_group("backend")
        cluster.warm({"backend": ()})
        pid = cluster.connection("backend-0").pid
        assert alive(pid)
    assert not alive(pid)


def test_a_closed_cluster_starts_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    part = cluster.worker_group("backend")
    cluster.close()
    cluster.close()
    with pytest.raises(WorkerError, match="closed"):
        part.spawn(TARGET, {})


def test_workers_open_when_the_cluster_closes_are_closed(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        cluster.worker_group("backend").spawn(TARGET, {"trace": str(tmp_path)})
    assert (tmp_path / "closed-backend-0").exists()


def test_a_child_in_a_session_of_its_own_ends_with_its_worker(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        children = workers.call("start_child") + workers.call("start_child", True)
        with pytest.raises(WorkerError):
            workers.call("die", signal.SIGKILL)
        wait_until(lambda: not any(map(alive, children)), "the children are gone")


DRIVER = """
import os, sys, time
from pathlib import Path
from whet.runtime.local import LocalCluster
from whet_testing.scripted_worker import TARGET

cluster = LocalCluster(Path(sys.argv[1]))
workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
pids = [state["pid"] for state in workers.call("state")]
pids += workers.call("start_child") + workers.call("start_child", True)
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
        assert len(pids) == 6
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
