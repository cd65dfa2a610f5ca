from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """Ray as whet starts it, once for a module's tests."""
    from whet.cluster.ray_session import RaySession

    session = RaySession()
    session.wait(120.0)
    yield
    session.close()


@pytest.fixture(scope="module")
def two_nodes(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine: the head has the resource `train`, the other one `gen`."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"train": 8}, **small})
    cluster.add_node(num_cpus=2, resources={"gen": 8}, object_store_memory=80 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
