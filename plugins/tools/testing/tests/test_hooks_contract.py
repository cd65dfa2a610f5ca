"""The contract of hooks lets good ones through, and refuses those that break a run."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from whet import hookimpl
from whet.errors import PluginError
from whet.interfaces.logger import RunInfo
from whet.plugins.registry import new_manager
from whet.run.observers import Observers
from whet.run.run_folder import RunFolder
from whet_testing.contracts.hooks import HooksContract


class Good:
    """Hears of steps, and surrounds the run."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    @hookimpl
    def whet_step_finished(self, step: int) -> None:
        self.heard.append(step)

    @hookimpl(wrapper=True)
    def whet_run(self) -> Iterator[None]:
        return (yield)


class TestGoodHooks(HooksContract):
    def make(self, run: RunInfo) -> Any:
        return Good()


class Replaces(Good):
    @hookimpl
    def whet_run(self, algorithm: Any) -> bool:  # type: ignore[override]
        return True


class Swallows(Good):
    @hookimpl(wrapper=True)
    def whet_run(self) -> Iterator[None]:
        with suppress(ArithmeticError):
            yield


class Unmarked(Good):
    def whet_check_config(self, config: Any) -> list[Any]:
        return []


class Changes(Good):
    @hookimpl
    def whet_step_finished(self, step: int, metrics: Any) -> None:  # type: ignore[override]
        metrics["mine"] = 1.0


class Awaited(Good):
    @hookimpl
    async def whet_step_finished(self, step: int) -> None:  # type: ignore[override]
        self.heard.append(step)


class Yields(Good):
    @hookimpl
    def whet_step_finished(self, step: int) -> Any:  # type: ignore[override]
        yield step


class ChecksAsync(Good):
    @hookimpl
    async def whet_check_config(self, config: Any) -> list[Any]:
        return []


class Elsewhere(Good):
    @hookimpl(wrapper=True)
    def whet_worker_group(self, group: Any) -> Iterator[None]:
        yield
        return None  # type: ignore[return-value]


KNOWN = "every_hook_is_one_that_whet_knows_and_none_replaces_that_of_core"


@pytest.mark.parametrize(
    ("hooks", "rule", "error", "words"),
    [
        (Replaces, KNOWN, PluginError, "would replace"),
        (Unmarked, "every_function_with_the_name_of_a_hook_is_marked", AssertionError, "not marked with @hookimpl"),
        (Awaited, KNOWN, PluginError, "whet_step_finished is `async def`.*write `def`"),
        (ChecksAsync, KNOWN, PluginError, "whet_check_config is `async def`"),
        (Awaited, "steps_are_heard_and_their_metrics_stay_as_they_are", PluginError, "must neither be `async def`"),
        (Yields, "steps_are_heard_and_their_metrics_stay_as_they_are", PluginError, "nor contain `yield`"),
        (Replaces, "the_algorithm_runs_once", AssertionError, "ran 0 times"),
        (Swallows, "an_error_of_the_algorithm_reaches_the_user", pytest.fail.Exception, "DID NOT RAISE"),
        (Changes, "steps_are_heard_and_their_metrics_stay_as_they_are", AssertionError, "mine"),
        (Elsewhere, "workers_answer_as_without_the_hooks", AttributeError, "NoneType"),
    ],
)
def test_what_breaks_a_run_is_refused(
    tmp_path: Any, hooks: type[Good], rule: str, error: type[BaseException], words: str
) -> None:
    class Contract(HooksContract):
        def make(self, run: RunInfo) -> Any:
            return hooks()

    run, manager = RunInfo(tmp_path, "it"), new_manager()
    manager.register(hooks())
    given = {"run": run, "hooks": Observers(manager, RunFolder(tmp_path)).hooks, "role": "backend"}
    test = getattr(Contract(), f"test_{rule}")
    arguments = test.__code__.co_varnames[1 : test.__code__.co_argcount]
    with pytest.raises(error, match=words):
        test(**{name: given[name] for name in arguments})
