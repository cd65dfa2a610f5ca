"""How tests are spread where several processes run them, `pytest -n 2`: file by file."""

from collections.abc import Iterator
from typing import Any

import pytest

WITH_RAY = frozenset(
    ("test_cluster.py", "test_nodes.py", "test_ranks.py", "test_session.py", "test_sleep.py", "test_under_ray.py",
     "test_where_it_runs.py")
)  # fmt: skip
"""These run one after another: clusters that start beside each other on one machine are slow beyond their deadlines."""


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """Start Ray as whet does, once for the tests of a module. Runs that these tests start join this Ray."""
    from whet_ray.session import RaySession

    session = RaySession()
    session.wait(120.0)
    yield
    session.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, for what they share, and those that start a Ray."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # untyped for who has no xdist
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "ray" if file.rpartition("/")[2] in WITH_RAY else file

    return Scheduling(config, log)
