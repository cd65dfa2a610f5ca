"""The rules that hooks must keep: those of a module, and those of an object that a run builds with settings.

    class TestProfile(HooksContract):
        def make(self, run: RunInfo) -> object:
            return Profile(ProfileConfig(), run)

`make` may also return the hook module of a plugin.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch
from whet.errors import WorkerError
from whet.interfaces.logger import RunInfo
from whet.interfaces.state import check_ran
from whet.interfaces.workers import WorkerRank
from whet.plugins.registry import new_manager, register
from whet.run.observers import Observers
from whet.run.run_folder import RunFolder
from whet.runtime.inline import InlineWorkerGroup
from whet_testing.batches import random_batch
from whet_testing.deadline import deadline

METRICS = {"loss": 0.5, "reward/mean": 0.25, "seconds/step": 1.5}


class Loop:
    """An algorithm that counts how often it runs, and fails if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs, self._error = 0, error

    def run(self, parts: Any) -> None:
        """Count, or fail."""
        self.runs += 1
        if self._error is not None:
            raise self._error


class NoSteps(list[Any]):
    """The steps of a run that has none left."""

    def stop(self) -> None:
        """Do nothing: there is no step to end after."""


class SmallWorker:
    """A worker with a method of each sort."""

    def __init__(self, rank: WorkerRank, base: int) -> None:
        self._rank, self._base = rank, base

    def train(self, batch: Batch, loss: str) -> float:
        """Return a number that depends on the batch and on the arguments of the worker."""
        return self._base + float(np.sum(batch["tokens"])) + len(loss)

    def refuse(self) -> None:
        """Raise an error."""
        raise ValueError("refused by the worker")

    async def asked(self, number: int) -> int:
        """Return a number, from a coroutine."""
        return self._base + number


class HooksContract:
    """Inherit this class and override `make`."""

    def make(self, run: RunInfo) -> Any:
        """Return the hooks under test: an object with settings, or a module."""
        raise NotImplementedError("override `make` to build the hooks")

    def parts(self, run: RunInfo) -> Any:
        """Return the parts of a run, as far as the hooks read them."""
        return SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(folder=str(run.folder))), steps=NoSteps())

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunInfo:
        """Return a fresh run of four steps. Its folder is inside of `tmp_path`."""
        folder = tmp_path / "runs" / "it"
        folder.mkdir(parents=True)
        return RunInfo(folder, "it", {"run": {"steps": 4}, "algorithm": {"use": "made-up"}}, steps=4)

    @pytest.fixture
    def hooks(self, run: RunInfo) -> Any:
        """Return the hooks of a run, those of core among them."""
        manager = new_manager()
        manager.register(self.make(run))
        return Observers(manager, RunFolder(run.folder)).hooks

    def test_every_hook_is_one_that_whet_knows_and_none_replaces_that_of_core(self, run: RunInfo) -> None:
        register(new_manager(), self.make(run))

    def test_every_function_with_the_name_of_a_hook_is_marked(self, run: RunInfo) -> None:
        made = self.make(run)
        named = [name for name in dir(made) if name.startswith("whet_") and callable(getattr(made, name))]
        unmarked = [name for name in named if not hasattr(getattr(made, name), "whet_impl")]
        assert not unmarked, f"not marked with @hookimpl, so never called: {', '.join(unmarked)}"

    def test_the_algorithm_runs_once(self, run: RunInfo, hooks: Any) -> None:
        loop = Loop()
        hooks.whet_run(algorithm=loop, parts=self.parts(run))
        assert loop.runs == 1, f"the algorithm ran {loop.runs} times; a wrapper has one `yield`"

    def test_an_error_of_the_algorithm_reaches_the_user(self, run: RunInfo, hooks: Any) -> None:
        with pytest.raises(ZeroDivisionError, match="from the algorithm"):
            hooks.whet_run(algorithm=Loop(ZeroDivisionError("from the algorithm")), parts=self.parts(run))

    def test_steps_are_heard_and_their_metrics_stay_as_they_are(self, hooks: Any) -> None:
        metrics = dict(METRICS)
        with deadline(20, "hearing of 100 steps"):
            for step in range(1, 101):
                for found in hooks.whet_step_finished(step=step, metrics=metrics):
                    check_ran(found, "whet_step_finished")
        assert metrics == METRICS

    @pytest.mark.parametrize("role", ["backend", "generator", "critic"])
    def test_workers_answer_as_without_the_hooks(self, hooks: Any, role: str) -> None:
        plain, batch = InlineWorkerGroup(role), random_batch(0)
        group = hooks.whet_worker_group(role=role, group=plain)
        assert (group.role, group.size, group.host_groups) == (plain.role, plain.size, plain.host_groups)
        target = f"{__name__}:{SmallWorker.__name__}"
        expected, workers = plain.spawn(target, {"base": 3}), group.spawn(target, {"base": 3})
        for _ in range(3):
            assert workers.call("train", batch, "pg") == expected.call("train", batch, "pg")
        assert workers.call("asked", 4) == [7]
        with pytest.raises(WorkerError, match="refused by the worker"):
            workers.call("refuse")
        with pytest.raises(WorkerError, match="no public method"):
            workers.call("missing")
        workers.close()
        workers.close()
