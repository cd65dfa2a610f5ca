"""What an environment with a curriculum does wrong is reported with the environment, the method and the value."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from whet.data.records import Group, Task
from whet.errors import EpisodeError, WhetError
from whet.interfaces.environment import SingleTurn
from whet.rollout.curricula import Curricula
from whet.rollout.routing import Route
from whet.rollout.staleness import Slot


class Climbing(SingleTurn):
    """Has one task, and the difficulty that it is given."""

    def __init__(self, difficulty: Any = 2, adapted: Callable[[Task], Any] = lambda task: task) -> None:
        super().__init__({"train": [Task("go")]}, {})
        self._difficulty, self._adapted = difficulty, adapted

    def difficulty(self) -> Any:
        return self._difficulty

    def adapted(self, task: Task, difficulty: float) -> Any:
        return self._adapted(task)

    def observe(self, groups: Sequence[Group]) -> None:
        raise KeyError("level")


def curricula(environment: Any, failures: list[BaseException]) -> Curricula:
    return Curricula([Route("hill", environment, "train")], lambda error, cause: failures.append(error))


def slot(difficulty: float | None) -> Slot:
    return Slot(0, 0, 0, 0, difficulty=difficulty)


@pytest.mark.parametrize("given", [None, "3", float("nan"), float("inf"), [2]], ids=repr)
def test_a_difficulty_that_is_no_number_ends_the_stream(given: Any) -> None:
    failures: list[BaseException] = []
    curricula(Climbing(given), failures).difficulty(0)
    (error,) = failures
    assert str(error) == (
        f"the curriculum of environment 'hill' failed: `difficulty` returned {given!r}, wanted a finite number"
    )


def test_a_difficulty_may_be_any_number() -> None:
    assert curricula(Climbing(3), []).difficulty(0) == 3.0


def test_an_exception_in_observe_is_reported_with_its_place() -> None:
    failures: list[BaseException] = []
    curricula(Climbing(), failures).observe([])
    (error,) = failures
    said = str(error)
    assert said.startswith("the curriculum of environment 'hill' failed: KeyError: 'level' (")
    assert said.endswith("in observe)")


class Awaited(Climbing):
    async def observe(self, groups: Sequence[Group]) -> None:  # type: ignore[override]
        raise AssertionError


def test_an_observe_that_nobody_awaits_is_reported() -> None:
    failures: list[BaseException] = []
    curricula(Awaited(), failures).observe([])
    (error,) = failures
    assert "`Awaited.observe` must neither be `async def`" in str(error)


def test_what_is_no_task_is_refused() -> None:
    made = curricula(Climbing(adapted=lambda task: task.prompt), [])
    with pytest.raises(EpisodeError, match=r"`adapted` returned .* at difficulty 2, wanted a Task; .* unchanged"):
        made.adapted(slot(2.0), Task("go"))
    assert made.adapted(slot(None), Task("go")) == Task("go")


class Flat(SingleTurn):
    """Has all of a curriculum but `adapted`."""

    def difficulty(self) -> float:
        return 1.0

    def observe(self, groups: Sequence[Group]) -> None:
        pass


def test_a_curriculum_that_lacks_a_method_is_refused() -> None:
    with pytest.raises(WhetError, match=r"'hill' has a curriculum without the method `adapted`; add it as `whet\."):
        curricula(Flat({"train": [Task("go")]}, {}), [])
