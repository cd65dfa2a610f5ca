"""Ray clusters of one node and of two, on this machine. They take seconds to start, so tests share them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray")

from whet.cluster.ray import RayCluster
from whet.cluster.slices import Slice
from whet.testing.contracts.workers import ProcessWorkersContract


class TestRay(ProcessWorkersContract):
    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def _ray(own_ray: None) -> None:
        """Start Ray once."""

    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], Slice]]:
        with RayCluster(folder) as cluster:
            yield cluster.slice


def test_a_breakpoint_in_the_driver_stays_that_of_python(own_ray: None) -> None:
    assert "ray" not in os.environ.get("PYTHONBREAKPOINT", "")
