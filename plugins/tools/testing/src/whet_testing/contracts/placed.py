"""Where the workers of a backend or generator under test run: in this process, or in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whet.interfaces.workers import Site, Slice, Workers
from whet.runtime.inline import InlineSlice
from whet.runtime.local import LocalCluster
from whet_testing.processes import descendants, survivors
from whet_testing.scripted_worker import TARGET
from whet_testing.site import make_site

Slices = Callable[[str], Slice]
"""Gives a role its slice."""


def on_gpu(role: str) -> Slice:
    """Put a role into this process, on its first GPU."""
    return InlineSlice(role, device="cuda:0")


class Placed:
    """What contracts of components with workers have in common."""

    processes: int = 0
    """Worker processes, a rank for each; 0: one rank in the test's own process, so that a debugger works."""
    held: tuple[str, ...] = ()
    """Roles whose processes live on from rule to rule, for to start one takes seconds: workers that are closed must
    leave nothing behind in them that others would notice. Where rules kill processes, none.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def slices(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slices]:
        """Share the cluster among all rules of a class. No process may be left behind."""
        if not cls.processes:
            yield InlineSlice
            return
        before = descendants()
        share = [(role, f"{role}-holder") for role in cls.held]
        with LocalCluster(tmp_path_factory.mktemp("logs"), share=share) as cluster:
            holders: dict[str, Workers] = {}

            def give(role: str) -> Slice:
                given = cluster.slice(role, size=cls.processes)
                if role in cls.held and role not in holders:
                    holders[role] = cluster.slice(f"{role}-holder", size=cls.processes).spawn(TARGET, {})
                return given

            yield give
        left = survivors(before, patience_seconds=5.0)
        assert not left, f"the workers left processes behind: {', '.join(map(str, left))}"

    def site(self, folder: Path, role: str, model_folder: Path, slices: Slices) -> Site:
        """Make the site that `make` gets."""
        return make_site(folder, role, model_folder, slices(role))
