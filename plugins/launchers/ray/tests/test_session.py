"""Sessions of one process that follow each other or overlap. In a module of its own, since each starts and ends Ray."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.errors import ClusterGone, ClusterLost, ConfigError, WhetError, WorkerError
from whet.runtime.hosts import Host
from whet_ray import life as ray_life
from whet_ray import session as ray_session
from whet_ray.cluster import RayCluster
from whet_ray.places import Names, Places
from whet_ray.session import RaySession, _not_started
from whet_testing.contracts.workers import alive, wait_until
from whet_testing.processes import adopting_orphans, descendants, survivors
from whet_testing.scripted_worker import TARGET


@pytest.fixture
def opened() -> Iterator[list[RaySession]]:
    sessions: list[RaySession] = []
    yield sessions
    for session in sessions:
        session.close()


def test_ray_ends_with_the_last_session_that_uses_it(opened: list[RaySession]) -> None:
    import ray

    first, second = RaySession(), RaySession()
    opened += first, second
    for session in opened:
        session.wait(120.0)
        assert session.local
        assert not session.ends_ray
    with pytest.raises(ConfigError, match="this process uses Ray at 'this machine' already"):
        RaySession("127.0.0.1:6379")
    first.close()
    first.close()
    assert second.nodes
    assert second.ends_ray
    second.close()
    assert not ray.is_initialized()


def test_a_session_waits_for_the_end_of_the_ray_before(opened: list[RaySession]) -> None:
    first = RaySession()
    opened.append(first)
    first.wait(120.0)
    before = first.nodes[0].id
    closing = Thread(target=first.close)
    closing.start()
    wait_until(lambda: not first._connection.sessions, "the first session has left its connection")
    second = RaySession()
    opened.append(second)
    second.wait(120.0)
    closing.join()
    assert [node.id != before for node in second.nodes] == [True]
    assert second.ends_ray


def test_a_raylet_that_is_stopped_is_killed_at_the_end(
    opened: list[RaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_END_SECONDS", 1.0)
    session = RaySession()
    opened.append(session)
    session.wait(120.0)
    (raylet,) = [process.pid for process in descendants() if "/raylet " in process.command]
    os.kill(raylet, signal.SIGSTOP)
    session.close()
    session._connection._thread.join(60.0)
    assert not session._connection._thread.is_alive()


@pytest.mark.parametrize(
    ("what", "limit", "told"),
    [
        (resource.RLIMIT_FSIZE, 1 << 20, r"cannot grow to 268,435,456 bytes: .* 1,048,576 \(ulimit -f\)"),
        (resource.RLIMIT_NOFILE, 100, r"Too many open files: a process may have 100 \(ulimit -n\)"),
    ],
)
def test_a_limit_with_which_ray_cannot_start_is_told(
    opened: list[RaySession], what: int, limit: int, told: str
) -> None:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        session = RaySession()
        opened.append(session)
        with pytest.raises(WhetError, match=told):
            session.wait(120.0)
    finally:
        resource.setrlimit(what, before)


def test_what_sigterm_does_is_left_to_this_process(opened: list[RaySession]) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        session = RaySession()
        opened.append(session)
        session.wait(120.0)
        os.kill(os.getpid(), signal.SIGTERM)
        session.close()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM, signal.SIGTERM]


DRIVER = """
import sys
from pathlib import Path
from whet_ray.cluster import RayCluster
from whet_testing.scripted_worker import TARGET

cluster = RayCluster(Path(sys.argv[1]))
cluster.worker_group("backend").spawn(TARGET, {}).call("state")
print(1, flush=True)
input()
cluster.close()
"""


@pytest.mark.parametrize("victim", ["the driver", "raylet"])
def test_nothing_that_ray_started_outlives_it_or_its_driver(victim: str, tmp_path: Path) -> None:
    with adopting_orphans():  # and reaping none: what has ended stays a zombie
        before = descendants()
        command = [sys.executable, "-c", DRIVER, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
            assert driver.stdin is not None
            assert driver.stdout is not None
            assert driver.stdout.readline() == b"1\n"
            started = descendants() - before
            for name in ("DashboardAgent", "NodeAgent", "worker_process"):
                assert any(name in process.command for process in started), name
            for name in ("monitor.py", "dashboard.py"):
                assert not any(name in process.command for process in started), name
            if victim == "raylet":
                (raylet,) = [process.pid for process in started if "/raylet/raylet" in process.command]
                os.kill(raylet, signal.SIGKILL)
                driver.stdin.write(b"\n")
            else:
                driver.kill()
        assert not survivors(before, patience_seconds=8.0)


def test_sigterm_to_every_process_ends_no_process_that_the_driver_needs(tmp_path: Path) -> None:
    before = descendants()
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        (state,) = workers.call("state")
        started = descendants() - before
        for process in started:
            os.kill(process.pid, signal.SIGTERM)
        assert workers.call("add", 1) == [1]
        (child,) = workers.call("start_child", True)
        os.kill(child, signal.SIGTERM)
        wait_until(lambda: not alive(child), "a program that the worker started has ended on SIGTERM")
        assert workers.call("state")[0]["pid"] == state["pid"]
        assert cluster.worker_group("generator").spawn(TARGET, {}).call("add", 2) == [2]


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_ray_that_is_lost_is_named_at_once_and_the_next_cluster_starts_another(name: str, tmp_path: Path) -> None:
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        hanging = workers.start("hang", timeout_seconds=100.0)
        (process,) = [p for p in descendants() if f"/{name} " in p.command]
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ClusterLost, match=rf"Ray's {name} on this machine is gone: .* killed by SIGKILL"):
            hanging.result()
        with pytest.raises(ClusterLost, match=name):
            cluster.worker_group("generator").spawn(TARGET, {})
    assert time.monotonic() - began < 20.0
    with RayCluster(tmp_path) as cluster:
        assert cluster.worker_group("backend").spawn(TARGET, {}).call("add", 1)


def test_the_head_of_a_joined_cluster_is_named_once_it_has_been_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray_life, "_MOST_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(ray_life.HeadSigns, "every", 0.5)
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    nodes: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        with RayCluster(tmp_path, address=nodes.address) as cluster:
            hanging = cluster.worker_group("backend").spawn(TARGET, {}).start("hang", timeout_seconds=100.0)
            nodes.head_node.all_processes["gcs_server"][0].process.kill()
            with pytest.raises(ClusterLost, match=rf"Ray's gcs_server at {nodes.address} .* has not answered for"):
                hanging.result()
        with (
            RayCluster(tmp_path, address=nodes.address) as cluster,
            pytest.raises(WorkerError, match="nobody answers at"),
        ):
            cluster.worker_group("backend").spawn(TARGET, {})
    finally:
        nodes.shutdown()


def test_what_ray_does_not_answer_is_not_waited_for(opened: list[RaySession]) -> None:
    import ray

    session, never = RaySession(), Future[None]()
    opened.append(session)
    session.wait(120.0)
    for name, number in (("raylet", signal.SIGSTOP), ("gcs_server", signal.SIGKILL)):
        (process,) = [p for p in descendants() if f"/{name} " in p.command]
        os.kill(process.pid, number)
    with pytest.raises(ClusterGone, match="gcs_server"):
        session.life.ask(never.result)
    never.set_result(None)
    began = time.monotonic()
    session.close()
    assert not ray.is_initialized()
    assert time.monotonic() - began < 30.0


def test_a_node_that_ray_has_given_up_is_a_lost_ray_before_its_raylet_ends(
    opened: list[RaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"failure_threshold": "1", "period_ms": "100", "timeout_ms": "100"}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)
    session = RaySession()
    opened.append(session)
    session.wait(120.0)
    places = Places(session, {}, {}, Names("run"))
    place(places, "backend-0")
    (raylet,) = [p for p in descendants() if "/raylet " in p.command]
    os.kill(raylet.pid, signal.SIGSTOP)
    wait_until(lambda: not session.nodes, "Ray has given its node up")
    for process in ("backend-0", "backend-1"):
        with pytest.raises(ClusterGone, match=r"Ray has (given up its only node|lost a placement group)"):
            place(places, process)
    assert session.life.lost.done()


def test_processes_that_wait_for_a_place_ask_ray_a_few_times_a_second_together(
    opened: list[RaySession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, asked, stopped = RaySession(), list[float](), Event()
    opened.append(session)
    session.wait(120.0)
    import ray.util

    known = ray.util.placement_group_table

    def table(group: object) -> object:
        asked.append(time.monotonic())
        return known(group)

    monkeypatch.setattr(ray.util, "placement_group_table", table)
    places = Places(session, {}, {"backend": {"nowhere": 1}}, Names("run"))
    hosts = [Host(f"backend-{rank}", ("backend",), 1, ()) for rank in range(4)]
    with ThreadPoolExecutor(len(hosts)) as pool:
        waiting = [pool.submit(places.bundle, host, hosts, time.monotonic() + 60.0, stopped) for host in hosts]
        wait_until(lambda: len(asked) >= 30, "they have asked for a while")
        stopped.set()
        assert all("closed while it waited" in str(one.exception()) for one in waiting)
    assert asked[29] - asked[24] > 0.5  # each process alone asks five times sooner, then every 0.2 s with the others


def place(places: Places, process: str) -> None:
    host = Host(process, ("backend",), 1, ())
    places.bundle(host, [host], time.monotonic() + 60.0, Event())


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_keeps_ray_from_being_there_is_told_of_the_role_that_wanted_it(ranks: int, tmp_path: Path) -> None:
    told = r"backend rank 0 failed in start: .*nobody answers at 127\.0\.0\.1:1 "
    with RayCluster(tmp_path, address="127.0.0.1:1") as cluster, pytest.raises(WorkerError, match=told):
        cluster.worker_group("backend", ranks).spawn(TARGET, {})


def test_an_error_of_several_lines_names_both_versions() -> None:
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\nThis one:\n    Ray: 2.59"
    )
    words = str(_not_started(RuntimeError(text)))
    assert "Ray: 2.60.0" in words
    assert "Ray: 2.59" in words
    assert str(_not_started(RuntimeError("one\ntwo"))).startswith("Ray: RuntimeError: one")
    assert "two" not in str(_not_started(RuntimeError("one\ntwo")))
