"""Place the workers of a backend or generator under test: in this process, or in processes of their own."""

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
"""Function role -> slice."""


def on_gpu(role: str) -> Slice:
    """Return a slice in this process, on its first GPU."""
    return InlineSlice(role, device="cuda:0")


class Placed:
    """The common part of the contracts of components with workers."""

    processes: int = 0
    """Number of worker processes, one rank in each. 0: one rank in the test's process, so that a debugger works."""
    held: tuple[str, ...] = ()
    """Roles whose processes are kept from rule to rule, because starting a process takes seconds. A closed worker must
    leave nothing in its process that could change the next rule. Leave this empty where rules kill processes.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def slices(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slices]:
        """Yield a function role -> slice on one cluster for all rules of a class. Fail if a process is left behind."""
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
        """Return the site that `make` gets."""
        return make_site(folder, role, model_folder, slices(role))
