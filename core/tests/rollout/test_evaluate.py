import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling, Task
from whet.errors import WhetError, WorkerError
from whet.interfaces.environment import Model, SingleTurn
from whet.rollout.evaluate import EnvironmentResult, clustered_mean, evaluate
from whet.rollout.loop import EpisodeLoop
from whet.rollout.routing import Route
from whet.testing.fakes import ByteChat, FakeGenerator


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
    assert result.reward == pytest.approx(rewards.mean())
    standard_error = rewards.mean(1).std(ddof=1) / math.sqrt(6)
    assert result.interval == pytest.approx(1.959963984540054 * standard_error)
    assert result.rewards["first"] == pytest.approx(np.mean([row["rewards"]["first"] for row in rows]))
    assert result.reward == pytest.approx(result.rewards["first"] + 0.5 * result.rewards["count"])
    assert (result.tasks, result.episodes, result.dropped, result.response_length) == (6, 24, 0, 4.0)


def test_the_interval_of_single_samples_is_the_usual_one() -> None:
    values = [1.0] * 30 + [0.0] * 70
    mean, interval = clustered_mean([[value] for value in values])
    assert mean == pytest.approx(0.3)
    assert interval == pytest.approx(1.959963984540054 * math.sqrt(0.3 * 0.7 / 99))


def test_samples_of_one_task_do_not_make_the_interval_narrower_than_they_should() -> None:
    """Repeating a task's outcome ten times adds nothing: the interval is that of the tasks."""
    tasks = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert clustered_mean([[value] * 10 for value in tasks]) == clustered_mean([[value] for value in tasks])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(1000):
        chances = rng.beta(2, 2, 60)  # how hard each task is; the mean over all tasks is 1/2
        mean, interval = clustered_mean((rng.random((60, 4)) < chances[:, None]).astype(float).tolist())
        assert interval is not None
        covered.append(abs(mean - 0.5) <= interval)
    assert 0.92 < np.mean(covered) < 0.97


def test_a_single_task_has_no_interval() -> None:
    (result,) = judged(Route("ab", environment(1), "test", samples=4))
    assert result.interval is None


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
    assert {name: len(rows) for name, rows in result.records.items()} == {"ab": 4, "more": 3}
    names = {"reward", "interval", "first", "count", "response_length", "dropped"}
    assert set(result.metrics) == {f"evaluation/{env}/{name}" for env in ("ab", "more") for name in names}
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
    assert (result.tasks, result.episodes, result.dropped) == (4, 8, 4)
    assert environment.tries == 8 + 4 * 3
    assert {row["task"] for row in result.records} == {0, 1, 3, 5}


def test_where_everything_fails_there_is_no_number() -> None:
    with pytest.raises(WhetError, match=r"evaluation of 'fragile': every episode failed; the last: .*timed out"):
        judged(Route("fragile", Fragile(set(range(6))), "test"))


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
    assert told[0] == "evaluation 0 %"
    assert told[-1] == ""
