"""Processes that share GPUs of a Ray cluster, whose GPUs exist in Ray's books alone.

In a module of its own, since a process is in one Ray cluster at a time.
"""

import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from whet.errors import WorkerLost
from whet.runtime.workers import ConnectedWorkers
from whet_ray.cluster import RayCluster
from whet_testing.scripted_worker import TARGET


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Two nodes on this machine, each with two GPUs that do not exist."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        small = {"include_dashboard": False, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, **small})
        cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=80 << 20)
        yield cluster
        ray: Any = import_module("ray")
        ray.shutdown()
        cluster.shutdown()


def seen(workers: ConnectedWorkers) -> list[tuple[str, set[str]]]:
    """Return the node and the GPUs of each worker."""
    found = workers.call("environment")
    return [(one["RAY_RAYLET_PID"], set(one["CUDA_VISIBLE_DEVICES"].split(","))) for one in found]


def test_an_engine_on_two_gpus_is_on_the_node_and_the_gpus_of_two_ranks_of_the_trainer(
    two_nodes: Any, tmp_path: Path
) -> None:
    import ray

    with RayCluster(tmp_path, address=two_nodes.address) as cluster:
        backend = cluster.worker_group("backend", 4, device=[f"cuda:{gpu}" for gpu in range(4)])
        generator = cluster.worker_group("generator", 2, device=["cuda:0,1", "cuda:2,3"])
        trainers, engines = backend.spawn(TARGET, {}), generator.spawn(TARGET, {})
        ranks, wide = seen(trainers), seen(engines)
        assert len({node for node, _ in wide}) == 2, "each node has two GPUs"
        for number, (node, gpus) in enumerate(wide):
            assert gpus == {"0", "1"}
            there = ranks[2 * number : 2 * number + 2]
            assert [place for place, _ in there] == [node, node]
            assert sorted(gpu for _, own in there for gpu in own) == ["0", "1"]
        assert ray.available_resources().get("GPU", 0) == 0, "all four are reserved, once"
        os.kill(engines.call("state")[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLost):
            engines.call("add", 1)
        engines.restart(1)
        assert seen(engines) == wide, "a replica that is replaced has its GPUs again"
        assert seen(trainers) == ranks
