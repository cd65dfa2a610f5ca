"""Ray clusters of one node and of two, on this machine. They take seconds to start, so tests share them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from whet.errors import WorkerError, WorkerLost
from whet.interfaces.workers import WorkerGroup
from whet.runtime.workers import ConnectedWorkers
from whet_ray.cluster import RayCluster
from whet_testing.contracts.workers import ProcessWorkersContract, alive, wait_until
from whet_testing.environments import bare_environment, make_environment
from whet_testing.processes import descendants
from whet_testing.scripted_worker import TARGET


class TestRay(ProcessWorkersContract):
    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def _ray(own_ray: None) -> None:
        """Start Ray once."""

    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], WorkerGroup]]:
        with RayCluster(folder) as cluster:
            yield cluster.worker_group


def stat(pid: int) -> list[str]:
    """The kernel's letter, the parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: stat(pid)[0] == "T", "it is stopped")


def test_a_late_answer_of_a_node_agent_is_not_taken_for_that_to_another_question(own_ray: None, tmp_path: Path) -> None:
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        process, pid = workers.processes[0], workers.call("state")[0]["pid"]
        agent = int(stat(pid)[1])
        stop(agent)
        try:
            assert process.state() == ""
        finally:
            os.kill(agent, signal.SIGCONT)
        time.sleep(1.0)  # by now the late answer is there: its process sleeps
        stop(pid)
        assert process.state() == "T"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_agent_that_did_not_end_its_process_in_time_is_ended_itself(own_ray: None, tmp_path: Path) -> None:
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        assert isinstance(workers, ConnectedWorkers)
        stop(int(stat(workers.call("state")[0]["pid"])[1]))
        hanging = workers.start("hang", timeout_seconds=0.5)
        with pytest.raises(WorkerLost, match="no answer within"):
            hanging.result()
        with pytest.raises(WorkerLost, match="its process was ended because"):
            workers.call("add", 1)


def test_a_thousand_calls_in_flight_take_no_more_threads_of_the_agent(own_ray: None, tmp_path: Path) -> None:
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend").spawn(TARGET, {})
        threads = Path(f"/proc/{stat(workers.call('state')[0]['pid'])[1]}/task")
        before = 0
        while before < (now := len(list(threads.iterdir()))):  # Ray begins some of its threads only when it is busy
            before = now
            pending = [workers.start("add", number) for number in range(20)]
            assert [call.result() for call in pending] == [[number] for number in range(20)]
        pending = [workers.start("add", number) for number in range(1000)]
        assert [call.result() for call in pending] == [[number] for number in range(1000)]
        assert len(list(threads.iterdir())) <= before


def test_a_large_argument_of_all_ranks_is_stored_once_and_one_of_a_single_rank_for_that_rank(
    own_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    stored, put = [], ray.put

    def counted(value: object) -> Any:
        stored.append(1)
        return put(value)

    monkeypatch.setattr(ray, "put", counted)
    with RayCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 2).spawn(TARGET, {})
        large = np.arange(1_000_000)
        for (result,) in workers.call("echo", large):
            assert np.array_equal(result, large)
        assert len(stored) == 1
        found = workers.scatter("echo", [(large,), (large[:500_000], "and a small one")])
        assert [len(result[0]) for result in found] == [1_000_000, 500_000]
        assert len(stored) == 3
        many = {f"{number}": np.full(5_000, number) for number in range(100)}
        ((result,),) = workers.start_on(0, "echo", many).result()
        assert all(np.array_equal(result[name], column) for name, column in many.items())


def test_a_cluster_gives_its_places_back_where_another_session_keeps_ray(own_ray: None, tmp_path: Path) -> None:
    import ray
    from ray.util import placement_group_table

    with RayCluster(tmp_path) as cluster:
        cluster.worker_group("backend").spawn(TARGET, {})
        assert "CREATED" in {group["state"] for group in placement_group_table().values()}
    assert ray.is_initialized()
    wait_until(
        lambda: {group["state"] for group in placement_group_table().values()} == {"REMOVED"}, "all is given back"
    )


def test_a_breakpoint_in_the_driver_stays_that_of_python(own_ray: None) -> None:
    assert "ray" not in os.environ.get("PYTHONBREAKPOINT", "")


def test_a_process_ends_with_its_node_agent(own_ray: None, tmp_path: Path) -> None:
    with RayCluster(tmp_path, environment={"MARK": "x"}) as cluster:
        part = cluster.worker_group("backend", threads=2)
        cluster.warm({"backend": ["wave"]}, ["backend"])
        workers = part.spawn(TARGET, {})
        (pid,), (environment,) = [state["pid"] for state in workers.call("state")], workers.call("environment")
        agent = int(stat(pid)[1])
        assert [environment[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MARK")] == ["2", "2", "x"]
        assert "RAY_AUTH_TOKEN" not in environment
        with pytest.raises(WorkerError, match=r"backend-0\.log"):
            workers.call("fail", (0,), "quoted in the log")
        pending = workers.start("hang")
        assert {p.pid: p.command for p in descendants()}[agent].startswith("ray::NodeAgent")
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"its node agent on .* was lost"):
            pending.result()
        wait_until(lambda: not alive(pid), "the process is gone")
    assert "quoted in the log" in (tmp_path / "backend-0.log").read_text()


def test_a_role_runs_in_a_python_of_its_own(own_ray: None, tmp_path: Path) -> None:
    """One that has no Ray: that is the business of who starts the process."""
    python = str(make_environment(tmp_path / "other", without=["ray"]))
    with RayCluster(tmp_path / "logs", python={"generator": python}) as cluster:
        workers = cluster.worker_group("generator").spawn(TARGET, {})
        assert workers.call("imported", "numpy")[0][1] == python
        with pytest.raises(WorkerError, match="No module named 'ray'"):
            workers.call("imported", "ray")


def test_a_python_without_core_is_refused_by_the_node_before_anything_starts(own_ray: None, tmp_path: Path) -> None:
    bare_environment(tmp_path / "bare")
    python = f"{tmp_path}/bare/bin/python"
    with (
        RayCluster(tmp_path / "logs", python={"generator": python}) as cluster,
        pytest.raises(WorkerError, match=f"generator rank 0 failed in start: .*: {python} has no whet"),
    ):
        cluster.worker_group("generator").spawn(TARGET, {})
