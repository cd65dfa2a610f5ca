import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling, Task
from whet.errors import ConfigError, PluginError, WhetError, WorkerError
from whet.evaluation.evaluate import evaluate
from whet.evaluation.result import EnvironmentResult
from whet.interfaces.environment import Model, SingleTurn
from whet.rollout.event_loop import EpisodeLoop
from whet.rollout.routing import Route
from whet.rollout.scoring import Passing, Scoring
from whet_testing.fakes import ByteChat, FakeGenerator

ENDS = ("", "/ci_low", "/ci_high")


def letters() -> FakeGenerator:
    return FakeGenerator(lambda prompt, rng: "".join(rng.choice(list("ab"), 3)))


def environment(tasks: int = 6) -> SingleTurn:
    rewards: dict[str, Any] = {
        "first": lambda text, data: float(text[0] == "a"),
        "count": (lambda text, data: float(text.count("a")), 0.5),
    }
    return SingleTurn({"test": [Task(f"q{i}", {"i": i}) for i in range(tasks)]}, rewards)


def judged(*routes: Route, generator: Any = None, **changes: Any) -> tuple[EnvironmentResult, ...]:
    sampling = Sampling(max_tokens=8)
    return evaluate(
        routes,
        generator or letters(),
        ByteChat(),
        sampling,
        0,
        **{"retries": 0, "infrastructure_retries": 0, **changes},
    ).environments


def test_means_and_interval_are_over_tasks() -> None:
    (result,) = judged(Route("ab", environment(), "test", samples=4))
    rows = result.records
    assert [(row["task"], row["sample"]) for row in rows] == [(t, s) for t in range(6) for s in range(4)]
    rewards = np.array([row["reward"] for row in rows]).reshape(6, 4)
    found = result.figures
    assert found["reward"].value == result.reward == pytest.approx(rewards.mean())
    standard_error = rewards.mean(1).std(ddof=1) / math.sqrt(6)
    assert found["reward"].high == pytest.approx(rewards.mean() + 2.570582 * standard_error)  # Student's t(5)
    assert found["first"].value == pytest.approx(np.mean([row["rewards"]["first"] for row in rows]))
    assert result.reward == pytest.approx(found["first"].value + 0.5 * found["count"].value)
    assert (len(result.tasks), result.episodes, result.dropped) == (6, 24, 0)
    assert found["response_length"].value == 4.0


def test_a_single_task_has_no_interval() -> None:
    result = evaluate([Route("ab", environment(1), "test", samples=4)], letters(), ByteChat(), Sampling(max_tokens=8),
                      0, retries=0, infrastructure_retries=0)  # fmt: skip
    assert all(found.low is None for found in result.environments[0].figures.values())
    assert not any(name.endswith(("ci_low", "ci_high")) for name in result.metrics)


def test_passes_and_votes_are_of_the_samples_that_were_played() -> None:
    given = environment()
    given.final_answer = lambda messages: messages[-1].text[:1].replace("b", "")
    passing = Passing("first", 1.0)
    (result,) = judged(Route("ab", given, "test", samples=4, scoring=Scoring((1, 3, 4), (1, 3), passing)))
    for task in result.tasks:
        texts = [row["messages"][-1]["content"] for row in result.records if row["task"] == task.task]
        right = sum(text[0] == "a" for text in texts)
        assert (task.samples, task.passes) == (4, right)
        assert task.answers == ((("a", right, right),) if right else ())
        assert task.values["pass@1"] == right / 4 == pytest.approx(task.values["maj@1"])
        assert task.values["pass@4"] == float(right > 0)
        assert task.values["maj@3"] == pytest.approx(
            task.values["pass@3"]
        )  # all others abstain, so any right answer is the majority
    answers = [row.get("answer") for row in result.records]
    assert answers == ["a" if row["messages"][-1]["content"][0] == "a" else None for row in result.records]


def test_a_pass_by_a_reward_that_there_is_not_ends_it_at_once() -> None:
    generator = letters()
    route = Route("ab", environment(50), "test", scoring=Scoring((1,), (), Passing("frist")))
    with pytest.raises(ConfigError, match=r"evaluation\.passing.reward is 'frist', .* gives first, count"):
        judged(route, generator=generator, concurrency=1)
    assert len(generator.requests) < 5


class Endless:
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, position: int) -> Task:
        return Task(f"q{position}")


def test_an_endless_split_wants_a_limit() -> None:
    given = environment()
    given.tasks = lambda split: Endless()  # type: ignore[assignment, return-value, misc]
    with pytest.raises(ConfigError, match=r"'ab': its split 'test' has 1,000,000,000,000 tasks; set `limit`"):
        judged(Route("ab", given, "test"))
    (result,) = judged(Route("ab", given, "test", limit=2))
    assert len(result.tasks) == 2


def test_a_task_that_cannot_be_read_is_named() -> None:
    given = environment()
    given.tasks = lambda split: Holed()  # type: ignore[assignment, return-value, misc]
    with pytest.raises(PluginError, match=r"task 1 of environment 'ab' failed: ValueError: no task here"):
        judged(Route("ab", given, "test"))


class Holed(Endless):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, position: int) -> Task:
        if position:
            raise ValueError("no task here")
        return super().__getitem__(position)


def test_an_answer_that_is_no_text_fails_the_episode() -> None:
    given = environment()
    given.final_answer = lambda messages: 7  # type: ignore[assignment, return-value]
    with pytest.raises(WhetError, match=r"final_answer\(\) gave 7, wanted text, or None"):
        judged(Route("ab", given, "test"))


def test_it_draws_alike_whatever_was_trained_in_between() -> None:
    route = Route("ab", environment(), "test", samples=2)
    one, later = letters(), letters()
    later.version = 40
    texts = [[row["messages"] for row in judged(route, generator=generator)[0].records] for generator in (one, later)]
    assert texts[0] == texts[1]
    (other,) = judged(Route("other", environment(), "test", samples=2))
    assert [row["messages"] for row in other.records] != texts[0]


def test_metrics_and_records_are_named_by_environment() -> None:
    routes = [Route("ab", environment(), "test", limit=4), Route("more", environment(3), "test")]
    result = evaluate(routes, letters(), ByteChat(), Sampling(max_tokens=8), 0, retries=0, infrastructure_retries=0)
    assert {name: len(rows) for name, rows in result.rows("x-").items()} == {
        "x-ab.jsonl": 4, "tasks/x-ab.jsonl": 4, "x-more.jsonl": 3, "tasks/x-more.jsonl": 3,
    }  # fmt: skip
    figures = [f"{name}{end}" for name in ("reward", "first", "count", "response_length") for end in ENDS]
    assert set(result.metrics) == {
        f"evaluation/{env}/{name}" for env in ("ab", "more") for name in [*figures, "dropped", "undecided"]
    }
    assert result.metrics["evaluation/ab/reward"].number() == result.environments[0].reward


class Fragile(SingleTurn):
    def __init__(self, bad: set[int]) -> None:
        super().__init__({"test": [Task("q", {"i": i}) for i in range(6)]}, {"one": lambda text, data: 1.0})
        self.bad, self.tries = bad, 0

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        self.tries += 1
        if task.data["i"] in self.bad:
            raise OSError("grader timed out")
        return await super().run(task, model)


def test_what_fails_is_tried_again_then_dropped_and_never_scored_0() -> None:
    environment = Fragile({2, 4})
    (result,) = judged(Route("fragile", environment, "test", samples=2), retries=2)
    assert result.reward == 1.0
    assert [task.samples for task in result.tasks] == [2, 2, 0, 2, 0, 2]
    assert (result.figures["reward"].tasks, result.episodes, result.dropped, result.infrastructure) == (4, 8, 4, 0)
    assert environment.tries == 8 + 4 * 3
    assert {row["task"] for row in result.records} == {0, 1, 3, 5}


def test_a_figure_leaves_out_tasks_of_which_too_few_samples_came_through() -> None:
    class Flaky(Fragile):
        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            rewards = await super().run(task, model)
            if task.data["i"] == 0 and self.tries == 1:
                raise ConnectionError("the sandbox went away")
            return rewards

    route = Route("fragile", Flaky({3}), "test", samples=3, scoring=Scoring((1, 3)))
    (result,) = judged(route, concurrency=1)
    assert {name: found.tasks for name, found in result.figures.items()}["pass@3"] == 4
    assert result.figures["pass@1"].tasks == 5
    assert result.missing == {
        **dict.fromkeys(
            ("one", "reward", "response_length", "pass@1"),
            "1 of 6 tasks left out: none of their episodes came through",
        ),
        "pass@3": "2 of 6 tasks left out: fewer than 3 of their episodes came through",
    }
    assert (result.dropped, result.infrastructure) == (4, 1)
    assert result.failure.startswith("environment 'fragile', task 0, sample 0 failed once; last: ConnectionError: the")
    assert result.summary()["dropped_because"] == result.failure
    assert result.figures["reward"].value == 1.0


def test_where_everything_fails_there_is_no_number() -> None:
    with pytest.raises(WhetError, match=r"evaluation of 'fragile': every episode failed; the last: .*timed out"):
        judged(Route("fragile", Fragile(set(range(6))), "test"))


def test_where_every_comparison_of_a_group_fails_its_error_is_named() -> None:
    class Comparing(Fragile):
        async def group_rewards(self, task: Task, episodes: Any) -> Any:
            raise KeyError("judge")

    with pytest.raises(
        WhetError, match=r"evaluation of 'fragile': every episode failed; the last: .*KeyError: 'judge'"
    ):
        judged(Route("fragile", Comparing(set()), "test", samples=2))


def test_a_dead_worker_ends_it_and_cancels_the_rest() -> None:
    class Dying(FakeGenerator):
        async def generate(self, request: Request) -> Completion:
            if len(self.requests) == 3:
                raise WorkerError("generator", 0, "generate", "out of memory")
            self._delay = 60.0
            return await super().generate(request)

    generator = Dying("x")
    with pytest.raises(WorkerError, match="out of memory"):
        judged(Route("ab", environment(), "test"), generator=generator)
    assert len(generator.cancelled) == 3


def test_no_more_episodes_than_wanted_play_at_one_time() -> None:
    class Counting(FakeGenerator):
        running = most = 0

        async def generate(self, request: Request) -> Completion:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.001)
            self.running -= 1
            return await super().generate(request)

    generator = Counting("x")
    judged(Route("ab", environment(20), "test"), Route("more", environment(20), "test"), generator=generator,
           concurrency=7)  # fmt: skip
    assert generator.most == 7


def test_it_runs_on_a_loop_of_others_and_says_how_far_it_is() -> None:
    told: list[str] = []
    loop = EpisodeLoop()
    try:
        generator = FakeGenerator("x", delay_seconds=0.5)
        judged(Route("ab", environment(), "test"), generator=generator, loop=loop, status=told.append)
        assert loop.call(lambda: "alive") == "alive"
    finally:
        loop.close()
    assert told[0] == "evaluation, 0 of 6 episodes finished"
    assert told[-1] == ""


def test_an_episode_that_goes_on_when_it_is_cancelled_ends_the_evaluation() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    stubborn, loop = environment(1), EpisodeLoop(stall_seconds=0.5)
    stubborn.run = run  # type: ignore[method-assign]
    with pytest.raises(WhetError, match=r"goes on \d+ seconds behind its time limit .*test_evaluate.py:\d+ in run"):
        judged(Route("ab", stubborn, "test"), loop=loop, deadline_seconds=0.2)
    loop.close()
