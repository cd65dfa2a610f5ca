"""Code that raises the same wherever it is played ends the run soon; an environment that fails at times does not."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from whet.config.sections import RolloutSection
from whet.data.records import Sampling, Task
from whet.errors import EpisodeError
from whet.evaluation.evaluate import evaluate
from whet.interfaces.environment import SingleTurn
from whet.rollout.fail_fast import FIRST_GROUPS, BrokenEnvironment
from whet.rollout.routing import Route
from whet.rollout.stream import RolloutStream
from whet_testing.fakes import ByteChat, FakeGenerator

GROUP_SIZE, RETRIES = 4, 2
Reward = Callable[[str, Mapping[str, Any]], Any]


class Counted:
    """A reward function that counts how often it is called."""

    def __init__(self, reward: Reward) -> None:
        self.reward, self.calls = reward, 0

    def __call__(self, text: str, data: Mapping[str, Any]) -> Any:
        self.calls += 1
        return self.reward(text, data)


def route(reward: Reward, tasks: int = 50) -> Route:
    every = [Task(f"q{i}", {"i": i}) for i in range(tasks)]
    return Route("letters", SingleTurn({"train": every}, {"right": reward}), "train")


def take(reward: Reward, groups: int, tasks: int = 50) -> dict[str, float]:
    """Take once, and give the metrics."""
    section = RolloutSection(max_tokens=8, retries=RETRIES)
    stream = RolloutStream(
        [route(reward, tasks)], FakeGenerator("abc"), ByteChat(), section, group_size=GROUP_SIZE, seed=0
    )
    try:
        stream.take(groups)
        return {name: metric.number() for name, metric in stream.metrics().items()}
    finally:
        stream.close()


def misspelt(text: str, data: Mapping[str, Any]) -> float:
    return float(text.is_upper())  # type: ignore[attr-defined]


def misused(text: str, data: Mapping[str, Any]) -> float:
    return float(re.match(None, text) is not None)  # type: ignore[call-overload]


@pytest.mark.parametrize("tasks", [50, 1])
def test_a_bug_ends_the_run_before_anything_is_played_again_and_again(tasks: int) -> None:
    reward = Counted(misspelt)
    with pytest.raises(BrokenEnvironment) as raised:
        take(reward, FIRST_GROUPS, tasks)
    first = FIRST_GROUPS * GROUP_SIZE
    assert str(raised.value).startswith(
        f"environment 'letters' fails wherever it is played: all {first} episodes of its first {FIRST_GROUPS} groups "
        "failed alike; the last: AttributeError: 'str' object has no attribute 'is_upper'"
    )
    line = misspelt.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}, in misspelt" in str(raised.value)
    assert reward.calls == first


def test_a_bug_that_shows_in_a_library_is_told_with_the_line_that_called_it() -> None:
    with pytest.raises(BrokenEnvironment) as raised:
        take(misused, FIRST_GROUPS)
    place = r"re/__init__\.py:\d+, in .*, called from .*test_fail_fast\.py:\d+, in misused\)$"
    assert re.search(place, str(raised.value))


def test_a_reward_that_is_never_a_number_is_the_same() -> None:
    with pytest.raises(BrokenEnvironment, match=r"failed alike; the last: .*gave the reward 'right' = 'yes', wanted a"):
        take(lambda text, data: "yes", FIRST_GROUPS)


def test_a_bug_is_found_by_steps_that_take_fewer_groups() -> None:
    reward = Counted(misspelt)
    with pytest.raises(BrokenEnvironment):
        take(reward, 2)
    assert reward.calls <= FIRST_GROUPS * GROUP_SIZE * (RETRIES + 1)


@pytest.mark.parametrize("every", [2, 3])
def test_what_fails_for_some_tasks_is_dropped_and_counted(every: int) -> None:
    def some(text: str, data: Mapping[str, Any]) -> float:
        return 1 / (data["i"] % every)

    metrics = take(some, 20)
    assert metrics["groups/dropped"] > 0


def several(text: str, data: Mapping[str, Any]) -> float:
    if data["i"] % 2:
        raise KeyError("odd")
    raise LookupError("even")


def told(text: str, data: Mapping[str, Any]) -> float:
    error = EpisodeError("as a process told it")
    vars(error)["origin"] = f"KeyError at game.py:{data['i'] % 2}"
    raise error


@pytest.mark.parametrize("reward", [several, told])
def test_errors_from_several_places_are_failures_of_single_episodes(reward: Reward) -> None:
    with pytest.raises(Exception, match="16 groups in a row failed"):
        take(reward, FIRST_GROUPS)


def test_infrastructure_has_its_own_budget() -> None:
    def unreachable(text: str, data: Mapping[str, Any]) -> float:
        raise ConnectionError("refused")

    section = RolloutSection(max_tokens=8, infrastructure_retries=0, max_infrastructure_groups=FIRST_GROUPS + 2)
    stream = RolloutStream([route(unreachable)], FakeGenerator("a"), ByteChat(), section, group_size=2, seed=0)
    with pytest.raises(Exception, match="10 groups in a row failed because of their infrastructure"):
        stream.take(FIRST_GROUPS)
    stream.close()


def test_an_evaluation_ends_as_soon() -> None:
    reward = Counted(misspelt)
    with pytest.raises(BrokenEnvironment, match=f"all {FIRST_GROUPS} episodes of its first"):
        evaluate(
            [route(reward)], FakeGenerator("abc"), ByteChat(), Sampling(max_tokens=8), 0,
            retries=RETRIES, infrastructure_retries=0, concurrency=FIRST_GROUPS,
        )  # fmt: skip
    assert reward.calls < 2 * FIRST_GROUPS
