"""Where the workers of a backend or generator under test run: in this process, or in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whet.cluster.inline import InlineSlice
from whet.cluster.local import LocalCluster
from whet.cluster.slices import Site, Slice
from whet.testing.processes import descendants, survivors
from whet.testing.site import make_site

Slices = Callable[[str], Slice]
"""Gives a role its slice."""


def on_gpu(role: str) -> Slice:
    """Put a role into this process, on its first GPU."""
    return InlineSlice(role, device="cuda:0")


class Placed:
    """What contracts of components with workers have in common."""

    processes: int = 0
    """Worker processes, a rank for each; 0: one rank in the test's own process, so that a debugger works."""

    @pytest.fixture(scope="class")
    @classmethod
    def slices(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slices]:
        """Share the processes among all rules of a class, for they take seconds to start. None may be left behind."""
        if not cls.processes:
            yield InlineSlice
            return
        before = descendants()
        with LocalCluster(tmp_path_factory.mktemp("logs")) as cluster:
            yield lambda role: cluster.slice(role, size=cls.processes)
        left = survivors(before, patience_seconds=5.0)
        assert not left, f"the workers left processes behind: {', '.join(map(str, left))}"

    def site(self, folder: Path, role: str, model_folder: Path, slices: Slices) -> Site:
        """Make the site that `make` gets."""
        return make_site(folder, role, model_folder, slices(role))
