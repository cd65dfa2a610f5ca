from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DIES_FORKING = """
import os, signal, sys
if "whet.runtime.forkserver" in sys.orig_argv:
    os.register_at_fork({}=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(params=["before", "after_in_parent"])
def dies_forking(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a module; a fork server that has imported it dies right before it forks, or right after that."""
    folder, name = tmp_path / "dying", f"dies_{request.param}_it_forks"
    folder.mkdir()
    (folder / f"{name}.py").write_text(DIES_FORKING.format(request.param))
    monkeypatch.syspath_prepend(str(folder))
    return name


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
