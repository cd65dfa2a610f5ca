"""Two Ray nodes on this machine: where processes go, how they meet, and what is said when one is lost.

In a module of its own, since a process is in one Ray cluster at a time.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.config.sections import DeadlinesSection
from whet.errors import WorkerError, WorkerLost
from whet_ray.cluster import RayCluster
from whet_testing.contracts.workers import alive, wait_until
from whet_testing.scripted_worker import TARGET

APART = {"backend": {"train": 1}, "generator": {"gen": 1}}


class Bare:
    """An actor with nothing of whet in it."""

    def pid(self) -> int:
        return os.getpid()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet_of(workers: Any) -> int:
    return int(workers.call("environment")[0]["RAY_RAYLET_PID"])


def test_roles_go_to_the_nodes_that_have_their_resources_and_ranks_meet_over_tcp(
    two_nodes: Any, tmp_path: Path
) -> None:
    with RayCluster(tmp_path, address=two_nodes.address, resources=APART, share=[["backend", "critic"]]) as cluster:
        groups = [
            cluster.worker_group("backend", 2),
            cluster.worker_group("critic"),
            cluster.worker_group("generator", 2, threads=1),
        ]
        backend, critic, generator = (part.spawn(TARGET, {}) for part in groups)
        assert len({raylet_of(workers) for workers in (backend, critic, generator)}) == 2
        assert raylet_of(backend) == raylet_of(critic)
        assert critic.call("state")[0]["pid"] == backend.call("state")[0]["pid"]
        meeting = {place.rendezvous for place in backend.call("place")}
        assert len(meeting) == 1
        # Not the loopback: nodes that join later must be able to meet there.
        assert meeting.pop().startswith(f"tcp://{two_nodes.address.rpartition(':')[0]}:")
        environment = generator.call("environment")[0]
        assert environment["OMP_NUM_THREADS"] == "1"
        assert not {"RAY_AUTH_TOKEN", "PYTHONBREAKPOINT"} & set(environment)


def listening(pid: int) -> set[str]:
    """The inodes of the sockets at which a process listens, of every kind."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    net = Path(f"/proc/{pid}/net")
    rows = [line.split() for name in ("tcp", "tcp6") for line in (net / name).read_text().splitlines()[1:]]
    found = {row[9] for row in rows if row[3] == "0A"}
    rows = [line.split() for line in (net / "unix").read_text().splitlines()[1:]]
    return own & (found | {row[6] for row in rows if int(row[3], 16) & 0x10000})


def test_no_process_of_a_run_listens_at_a_socket_of_its_own(two_nodes: Any, tmp_path: Path) -> None:
    import ray

    before = listening(os.getpid())  # what other tests of this process hold
    with RayCluster(tmp_path, address=two_nodes.address, resources=APART) as cluster:
        first = cluster.worker_group("generator", 2).spawn(TARGET, {})
        driver = listening(os.getpid())
        bare: Any = ray.remote(num_cpus=0)(Bare).remote()
        of_ray = len(listening(ray.get(bare.pid.remote())))
        second = cluster.worker_group("backend", 2).spawn(TARGET, {})
        assert second.call("echo", bytes(1_000_000)) == [[bytes(1_000_000)]] * 2
        processes = [state["pid"] for workers in (first, second) for state in workers.call("state")]
        assert [listening(pid) for pid in processes] == [set()] * 4
        assert [len(listening(parent(pid))) for pid in processes] == [of_ray] * 4
        assert listening(os.getpid()) == driver
        assert len(driver - before) <= of_ray


def test_output_of_workers_on_nodes_ends_in_the_run_s_logs(two_nodes: Any, tmp_path: Path) -> None:
    with RayCluster(tmp_path, address=two_nodes.address, resources=APART) as cluster:
        workers = cluster.worker_group("generator").spawn(TARGET, {})
        with pytest.raises(WorkerError, match=r"generator-0\.log"):
            workers.call("fail", (0,), "quoted in the log")
    assert "quoted in the log" in (tmp_path / "generator-0.log").read_text()


def test_a_missed_deadline_shows_where_a_worker_on_a_node_hangs_and_one_that_stands_still_is_named(
    two_nodes: Any, tmp_path: Path
) -> None:
    with RayCluster(tmp_path, address=two_nodes.address) as cluster:
        part = cluster.worker_group("backend", 2)
        workers = part.spawn(TARGET, {})
        with pytest.raises(WorkerError) as caught:
            workers.call("hang", timeout_seconds=0.3)
        assert caught.value.last_words.count("in hang") == 2
        workers.close()
        workers = part.spawn(TARGET, {})
        os.kill(workers.call("state")[1]["pid"], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank 1 failed in hang: .* its process is stopped"):
            workers.call("hang", timeout_seconds=0.3)


def test_what_cannot_be_placed_is_refused_with_what_was_asked_and_what_there_is(two_nodes: Any, tmp_path: Path) -> None:
    wanted = {"backend": {"train": 9}}
    with RayCluster(tmp_path, DeadlinesSection(start=3.0), address=two_nodes.address, resources=wanted) as cluster:
        with pytest.raises(WorkerError) as caught:
            cluster.worker_group("backend", threads=1).spawn(TARGET, {})
        message = str(caught.value)
        assert "asked for 1 x CPU 1 + train 9" in message
        assert "CPU 2, train 8" in message
        assert "no node can hold that" in message


def test_a_killed_node_agent_is_named_with_its_node_and_takes_its_processes_along(
    two_nodes: Any, tmp_path: Path
) -> None:
    with RayCluster(tmp_path, address=two_nodes.address, resources=APART) as cluster:
        backend, generator = (
            cluster.worker_group("backend").spawn(TARGET, {}),
            cluster.worker_group("generator").spawn(TARGET, {}),
        )
        pid = generator.call("state")[0]["pid"]
        pids = [pid, *generator.call("start_child"), *generator.call("start_child", True)]
        hanging = generator.start("hang", phase="generate")
        os.kill(parent(pid), signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"generator rank 0 failed in generate: its node agent on \S+ \(\w+\) was"):
            hanging.result()
        wait_until(lambda: not any(map(alive, pids)), "the worker and its children are gone")
        assert backend.call("add", 1) == [1]
        generator.restart(0)
        assert generator.call("add", 1) == [1]


def test_a_run_that_ends_leaves_no_node_agent_behind(two_nodes: Any, tmp_path: Path) -> None:
    with RayCluster(tmp_path, address=two_nodes.address) as cluster:
        pids = [state["pid"] for state in cluster.worker_group("backend", 2).spawn(TARGET, {}).call("state")]
        agents = [parent(pid) for pid in pids]
    wait_until(lambda: not any(map(alive, [*pids, *agents])), "the agents are gone")


DRIVER = """
import sys, time
from pathlib import Path
from whet_ray.cluster import RayCluster
from whet_testing.scripted_worker import TARGET

cluster = RayCluster(Path(sys.argv[1]), address=sys.argv[2])
workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
pids = [state["pid"] for state in workers.call("state")] + workers.call("start_child", True)
hanging = workers.start("hang")
print(*pids, flush=True)
time.sleep(1000)
"""


def test_nothing_on_any_node_outlives_a_killed_driver(two_nodes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path), two_nodes.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 4
        agents = [parent(pid) for pid in pids[:2]]
        driver.kill()
    wait_until(lambda: not any(map(alive, [*pids, *agents])), "the workers, their children and agents are gone")


def test_a_node_agent_does_not_end_on_sigterm(two_nodes: Any, tmp_path: Path) -> None:
    with RayCluster(tmp_path, address=two_nodes.address) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        agent = parent(workers.call("state")[0]["pid"])
        os.kill(agent, signal.SIGTERM)
        assert workers.call("add", 1) == [1]
        assert alive(agent)


def test_a_lost_node_is_named_and_the_others_go_on(two_nodes: Any, tmp_path: Path) -> None:
    node = two_nodes.add_node(num_cpus=1, resources={"lost": 1}, object_store_memory=80 << 20)
    wanted = {"backend": {"train": 1}, "generator": {"lost": 1}}
    with RayCluster(tmp_path, address=two_nodes.address, resources=wanted) as cluster:
        backend, generator = (
            cluster.worker_group("backend").spawn(TARGET, {}),
            cluster.worker_group("generator").spawn(TARGET, {}),
        )
        pid = generator.call("state")[0]["pid"]
        hanging = generator.start("hang", phase="generate")
        begin = time.monotonic()
        two_nodes.remove_node(node, allow_graceful=False)
        with pytest.raises(WorkerLost, match=r"generator rank 0 failed in generate: .* node \S+ \(\w+\) was lost"):
            hanging.result()
        assert time.monotonic() - begin < 20.0
        wait_until(lambda: not alive(pid), "its worker is gone")
        assert backend.call("add", 1) == [1]
