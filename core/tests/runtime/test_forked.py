"""Processes that are forked from one that has imported what they need keep the contract of any other."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from whet.errors import WorkerError, WorkerLost
from whet.interfaces.workers import WorkerGroup
from whet.runtime.forked import Forked, ForkServer, NoForkServer
from whet.runtime.launcher import Cluster
from whet.runtime.local import LocalCluster
from whet.runtime.process import import_folders, worker_environment
from whet.runtime.workers import ConnectedWorkers
from whet_testing.contracts.workers import ProcessWorkersContract, alive, wait_until
from whet_testing.processes import descendants
from whet_testing.scripted_worker import TARGET

pytestmark = pytest.mark.usefixtures("no_orphans")

WHO_IMPORTS = "import os, pathlib\npathlib.Path(__file__).with_name(f'by-{os.getpid()}').touch()\n"
A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


def slice_of(cluster: Cluster, role: str, ranks: int, modules: Sequence[str] = ()) -> WorkerGroup:
    part = cluster.worker_group(role, ranks)
    cluster.warm({role: modules}, [role])
    return part


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def servers() -> list[int]:
    return [process.pid for process in descendants() if "whet.runtime.forkserver" in process.command]


def pids(workers: ConnectedWorkers) -> list[int]:
    return [state["pid"] for state in workers.call("state")]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that writes a module which workers can import."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, text: str) -> Path:
        (folder / f"{name}.py").write_text(text)
        return folder

    return write


class TestForked(ProcessWorkersContract):
    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], WorkerGroup]]:
        with LocalCluster(folder) as cluster:
            yield lambda role, ranks: slice_of(cluster, role, ranks)


def test_what_several_processes_need_is_imported_once(tmp_path: Path, module: Callable[[str, str], Path]) -> None:
    folder = module("who_imports", WHO_IMPORTS)
    with LocalCluster(tmp_path / "logs") as cluster:
        workers = slice_of(cluster, "backend", 2, ["who_imports", "no_such_module"]).spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        (server,) = servers()
        assert [file.name for file in folder.glob("by-*")] == [f"by-{server}"]
        assert [path for path, _ in workers.call("imported", "who_imports")] == [f"{folder}/who_imports.py"] * 2
        assert [parent(pid) for pid in pids(workers)] == [server, server]
        assert len(list(folder.glob("by-*"))) == 1


def test_each_has_its_name_its_log_its_session_and_its_environment(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, environment={"MARK": "x"}) as cluster:
        part = cluster.worker_group("backend", 2, threads=3)
        cluster.warm({"backend": []}, ["backend"])
        workers = part.spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        for rank, (pid, environment) in enumerate(zip(pids(workers), workers.call("environment"), strict=True)):
            assert command(pid).endswith(f" backend-{rank}")
            assert "-m whet.runtime.worker_process" in command(pid)
            assert os.getpgid(pid) == os.getsid(pid) == pid
            found = [environment[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MARK")]
            assert found == ["3", "3", "x"]
        assert len({environment["WHET_FAMILY"] for environment in workers.call("environment")}) == 2
        with pytest.raises(WorkerError, match=r"rank 1 .*backend-1\.log"):
            workers.call("fail", (1,), "quoted in the log")
        with pytest.raises(WorkerLost, match="rank 0 failed in die: its process exited with code 4"):
            workers.start_on(0, "die", -4, "last words").result()
        with pytest.raises(WorkerLost, match="rank 1 failed in die: its process was killed by SIGSEGV"):
            workers.start_on(1, "die", signal.SIGSEGV).result()
    assert "quoted in the log" in (tmp_path / "backend-1.log").read_text()
    assert "last words" in (tmp_path / "backend-0.log").read_text()
    assert not list(tmp_path.glob("fork-server*")), "it wrote nothing"


def test_where_an_import_starts_a_thread_nothing_is_forked(tmp_path: Path, module: Callable[[str, str], Path]) -> None:
    module("with_a_thread", A_THREAD)
    with LocalCluster(tmp_path / "logs") as cluster:
        workers = slice_of(cluster, "backend", 2, ["with_a_thread"]).spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        assert [parent(pid) for pid in pids(workers)] == [os.getpid()] * 2


def test_only_processes_that_are_alike_and_may_be_forked_are(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, python={"own": sys.executable}) as cluster:
        alike = [cluster.worker_group("one"), cluster.worker_group("other")]
        apart = [
            cluster.worker_group("more", threads=2),
            cluster.worker_group("own"),
            cluster.worker_group("unsafe"),
            cluster.worker_group("device", device="cuda:0"),
        ]
        roles = [part.role for part in (*alike, *apart)]
        cluster.warm(dict.fromkeys(roles, ()), set(roles) - {"unsafe"})
        wait_until(lambda: bool(servers()), "the fork server has started")
        (server,) = servers()
        for part in alike:
            assert parent(cluster.connection(part.host_groups[0]).pid) == server
        for part in apart:
            assert parent(cluster.connection(part.host_groups[0]).pid) == os.getpid(), part.role


def test_a_killed_fork_server_is_told_of_and_what_comes_after_does_without(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = slice_of(cluster, "backend", 2).spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        before = pids(workers)
        children = workers.call("start_child") + workers.call("start_child", True)
        pending = [workers.start_on(rank, "hang") for rank in range(2)]
        os.kill(servers()[0], signal.SIGKILL)
        for rank, lost in enumerate(pending):
            cause = f"backend rank {rank} failed in hang: its process ended: it was killed with the fork server"
            with pytest.raises(WorkerLost, match=cause):
                lost.result()
        wait_until(lambda: not any(map(alive, [*before, *children])), "the workers and their children are gone")
        workers.restart(0)
        workers.restart(1)
        assert workers.call("add", 1) == [1, 1]
        assert [parent(pid) for pid in pids(workers)] == [os.getpid()] * 2


def test_a_fork_server_that_dies_while_it_forks_is_done_without(tmp_path: Path, dies_forking: str) -> None:
    with LocalCluster(tmp_path / "logs") as cluster:
        workers = slice_of(cluster, "backend", 2, [dies_forking]).spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        assert workers.call("add", 1) == [1, 1]
        assert [parent(pid) for pid in pids(workers)] == [os.getpid()] * 2


def test_the_end_of_a_process_is_heard_of_where_its_fork_server_stands_still(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        workers = slice_of(cluster, "backend", 2).spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        victim, _ = pids(workers)
        pending = workers.start_on(0, "hang")
        os.kill(servers()[0], signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="rank 0 failed in hang: its process ended: it came from a fork server"):
            pending.result()


def test_a_fork_server_that_imports_for_too_long_is_not_waited_for(
    tmp_path: Path, module: Callable[[str, str], Path]
) -> None:
    module("for_ever", "import time\ntime.sleep(1000)\n")
    order = {"path": import_folders(), "add": []}
    server = ForkServer("test", ["for_ever"], order, worker_environment(os.environ, 1, ""), tmp_path / "log", 0.3)
    try:
        with pytest.raises(NoForkServer, match="not ready"):
            Forked(server, "x-0", environment={}, output=2)
        with pytest.raises(NoForkServer, match="not ready"):
            Forked(server, "x-0", environment={}, output=2, stopped=lambda: True)
    finally:
        server.close()
    with pytest.raises(NoForkServer, match="gone"):
        Forked(server, "x-0", environment={}, output=2)


def test_an_owner_that_is_gone_takes_its_process_along(tmp_path: Path) -> None:
    order = {"path": import_folders(), "add": []}
    server = ForkServer("test", [], order, worker_environment(os.environ, 1, ""), tmp_path / "log")
    try:
        owned = Forked(server, "x-0", environment={}, output=2)
        kept = Forked(server, "x-1", environment={}, output=2)
        owned._line.shutdown(socket.SHUT_RDWR)  # as the end of its driver does
        wait_until(lambda: not alive(owned.pid), "its process is gone")
        assert alive(kept.pid)
        for one in (owned, kept):
            one.signal()
            one.wait()
            one.socket.close()
    finally:
        server.close()


DRIVER = """
import sys, time
from pathlib import Path
from whet.runtime.local import LocalCluster
from whet_testing.scripted_worker import TARGET

cluster = LocalCluster(Path(sys.argv[1]))
part = cluster.worker_group("backend", 2)
cluster.warm({"backend": ()}, ["backend"])
workers = part.spawn(TARGET, {})
pids = [state["pid"] for state in workers.call("state")]
pids += workers.call("start_child") + workers.call("start_child", True)
hanging = workers.start("hang")
print(*pids, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_that_was_forked_outlives_a_killed_driver(tmp_path: Path, stopped: bool) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        found = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(found) == 6
        server = parent(found[0])
        if stopped:
            os.kill(server, signal.SIGSTOP)
            time.sleep(0.05)
        driver.kill()
        driver.wait(10.0)
    wait_until(lambda: not any(map(alive, [*found, server])), "the workers and their children are gone")


def test_what_is_imported_ahead_is_no_business_of_the_garbage_collector() -> None:
    code = """
import gc
from whet.runtime.worker_process import import_ahead
import_ahead(["email.mime.audio", "nobody.has.this"])
module = __import__("sys").modules["email.mime.audio"]
print(gc.isenabled(), gc.is_tracked(vars(module)), any(each is vars(module) for each in gc.get_objects()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]
