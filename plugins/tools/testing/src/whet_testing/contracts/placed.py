"""Place the workers of a backend or generator under test: in this process, or in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whet.component import WorkerFacts
from whet.interfaces.workers import RoleContext, WorkerGroup
from whet.runtime.inline import InlineWorkerGroup
from whet.runtime.local import LocalCluster
from whet_testing.held import hold, holder_of
from whet_testing.processes import descendants, survivors
from whet_testing.role_context import make_context

WorkerGroups = Callable[[str], WorkerGroup]
"""Function role -> worker group."""


def on_gpu(role: str) -> WorkerGroup:
    """Return a worker group in this process, on its first GPU."""
    return InlineWorkerGroup(role, device="cuda:0")


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
    def groups(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroups]:
        """Yield a function role -> worker group; all rules of a class share one cluster. Fail if a process is left."""
        if not cls.processes:
            yield InlineWorkerGroup
            return
        before, facts = descendants(), cls().facts()
        share = [(role, holder_of(role)) for role in cls.held]
        with LocalCluster(tmp_path_factory.mktemp("logs"), share=share) as cluster:
            begun: set[str] = set()

            def give(role: str) -> WorkerGroup:
                given = cluster.worker_group(role, size=cls.processes)
                imports, forkable = ((), False) if facts is None else (facts.imports, facts.forkable)
                if role not in begun and role in cls.held:
                    hold(cluster, [role], cls.processes, imports, forkable)
                elif role not in begun and imports:  # as in a run, they import while other things are prepared
                    cluster.warm({role: imports}, [role] if forkable else ())
                begun.add(role)
                return given

            yield give
        left = survivors(before, patience_seconds=5.0)
        assert not left, f"the workers left processes behind: {', '.join(map(str, left))}"

    def facts(self) -> WorkerFacts | None:
        """Return the facts of what is tested. None skips the rules about them, and nothing is imported early."""
        return None

    def need_one_gpu(self) -> None:
        """Skip a rule whose component is built on one rank with a GPU, where it needs more, or does not sleep there."""
        if self.processes > 1:
            pytest.skip(f"the config of these tests is for {self.processes} ranks, and this rule is about one GPU")
        facts = self.facts()
        if facts is None or "cuda" not in facts.sleeps:
            pytest.skip("its facts do not name a sleep on GPUs")

    def context(self, folder: Path, role: str, model_folder: Path, groups: WorkerGroups) -> RoleContext:
        """Return the context that `make` gets."""
        return make_context(folder, role, model_folder, groups(role))
