import asyncio
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from whet.data.records import Task
from whet.errors import DataError, EpisodeError, PluginError
from whet.interfaces.environment import Environment, SingleTurn, checked_rewards
from whet_testing.fakes import FakeModel

TASKS = [Task("2+2?", {"answer": "4"}), Task("3+3?", {"answer": "6"})]


def correct(text: str, data: Mapping[str, Any]) -> float:
    return float(text == data["answer"])


async def slowly(text: str, data: Mapping[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(text) / 10


def play(environment: Environment, answer: str, task: Task = TASKS[0]) -> Mapping[str, float]:
    return asyncio.run(environment.run(task, FakeModel(answer)))


def test_a_question_is_asked_once_and_its_answer_graded() -> None:
    model = FakeModel(["4"])
    environment = SingleTurn({"train": TASKS}, rewards={"correct": correct})
    assert asyncio.run(environment.run(TASKS[0], model)) == {"correct": 1.0}
    assert [(m.role, m.text) for m in model.messages] == [("user", "2+2?"), ("assistant", "4")]


def test_rewards_have_names_weights_and_may_be_async() -> None:
    environment = SingleTurn({"train": TASKS}, rewards={"correct": correct, "length": (slowly, 0.1)})
    assert play(environment, "four") == {"correct": 0.0, "length": 0.4}
    assert environment.reward_weights == {"correct": 1.0, "length": 0.1}


@pytest.mark.parametrize("given", [[correct, 0.1], None, "correct", (correct,), (correct, 0.1, 2)])
def test_a_reward_that_is_no_function_is_refused_at_once(given: Any) -> None:
    with pytest.raises(PluginError, match=r"the reward 'r' of a SingleTurn is .*; wanted a function, or a tuple"):
        SingleTurn({"train": TASKS}, rewards={"r": given})


def test_tasks_are_those_of_the_split() -> None:
    environment = SingleTurn({"train": TASKS, "test": TASKS[:1]}, rewards={"correct": correct})
    assert (len(environment.tasks("train")), len(environment.tasks("test"))) == (2, 1)


def test_an_unknown_split_names_those_that_exist() -> None:
    environment = SingleTurn({"train": TASKS, "test": TASKS}, rewards={"correct": correct})
    with pytest.raises(DataError, match="no split 'tset'; there are train, test"):
        environment.tasks("tset")


def test_it_is_an_environment() -> None:
    assert isinstance(SingleTurn({}, {}), Environment)


def test_finite_numbers_of_any_kind_pass() -> None:
    given = {"a": 1, "b": True, "c": np.float32(0.5), "d": np.int64(3)}
    checked = checked_rewards(given, "sums")
    assert checked == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 3.0}
    assert all(type(value) is float for value in checked.values())


class Score(StrEnum):
    CORRECT = "right"


def test_a_reward_may_have_the_name_of_an_enum_and_is_sent_as_text() -> None:
    (name,) = checked_rewards({Score.CORRECT: 1.0}, "sums")
    assert (name, type(name)) == ("right", str)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, -2e18, 10**400, "high", "3", None, [1.0], 1j])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(EpisodeError, match=r"'sums' gave the reward 'correct' = .*, wanted a finite number"):
        checked_rewards({"fine": 1.0, "correct": value}, "sums")


@pytest.mark.parametrize("rewards", [None, 1.0, [], [("correct", 1.0)], "correct"])
def test_what_is_no_mapping_of_rewards_is_refused(rewards: object) -> None:
    with pytest.raises(EpisodeError, match=r"'sums' returned .*, wanted a mapping"):
        checked_rewards(rewards, "sums")


@pytest.mark.parametrize("name", ["mean", "greedy", "pass@1"])
def test_a_reward_with_the_name_of_another_metric_is_refused(name: str) -> None:
    with pytest.raises(EpisodeError, match="metrics of other things have this name; rename it"):
        checked_rewards({name: 1.0}, "sums")


@pytest.mark.parametrize("name", ["", 5, "a\nb"])
def test_a_reward_without_a_printable_name_is_refused(name: Any) -> None:
    with pytest.raises(EpisodeError, match=r"'sums' gave a reward the name .*, wanted printable text"):
        checked_rewards({name: 1.0}, "sums")


def test_a_long_reward_is_quoted_short() -> None:
    with pytest.raises(EpisodeError) as caught:
        checked_rewards({"correct": "x" * 100_000}, "sums")
    assert len(str(caught.value)) < 300
