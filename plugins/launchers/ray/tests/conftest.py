from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture(scope="module")
def two_nodes(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine: the head has the resource `train`, the other one `gen`."""
    from ray.cluster_utils import Cluster

    monkeypatch_module.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"train": 8}, **small})
    cluster.add_node(num_cpus=2, resources={"gen": 8}, object_store_memory=80 << 20)
    yield cluster
    ray: Any = import_module("ray")
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
