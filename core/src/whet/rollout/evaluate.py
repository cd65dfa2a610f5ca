"""Evaluation: play every task of some environments, and say how sure the mean reward is."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from whet.data.records import Episode, Group, Sampling
from whet.errors import WhetError
from whet.metrics import Metric, mean, total
from whet.rollout.collate import record, response_length, reward_names
from whet.rollout.episode import Assignment, Chat, EpisodeFailed, Player, with_stop_tokens
from whet.rollout.loop import EpisodeLoop, gather_or_cancel
from whet.rollout.routing import Route

if TYPE_CHECKING:
    from whet.config.sections import EvaluationSection, RolloutSection
    from whet.interfaces.generator import Generator

NORMAL_95 = 1.959963984540054
"""Half-width of the central 95 % of a normal distribution, in standard deviations."""


@frozen(eq=False)
class EnvironmentResult:
    """What the model achieved in one environment."""

    name: str
    reward: float
    """Mean over tasks of the mean over the task's samples."""
    interval: float | None
    """Half-width of the 95 % interval of `reward`; None for a single task, which says nothing of others."""
    rewards: Mapping[str, float]
    """The same mean for each named reward."""
    tasks: int
    """Tasks with at least one finished episode."""
    episodes: int
    dropped: int
    """Episodes that failed on every attempt. They count nowhere else."""
    response_length: float
    """Mean over episodes, in tokens that the model produced."""
    records: tuple[dict[str, Any], ...]
    """A row for each episode, for the run folder."""


@frozen(eq=False)
class EvaluationResult:
    """What the model achieved."""

    environments: tuple[EnvironmentResult, ...]

    @property
    def records(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """Rows for the run folder, by environment."""
        return {result.name: result.records for result in self.environments}

    @property
    def metrics(self) -> dict[str, Metric]:
        """Give it as `evaluation/ENVIRONMENT/...` metrics."""
        metrics: dict[str, Metric] = {}
        for result in self.environments:
            numbers = {**result.rewards, "reward": result.reward, "response_length": result.response_length}
            if result.interval is not None:
                numbers["interval"] = result.interval
            metrics |= {f"evaluation/{result.name}/{name}": mean(value) for name, value in numbers.items()}
            metrics[f"evaluation/{result.name}/dropped"] = total(result.dropped)
        return metrics


class Evaluator:
    """Evaluates again and again on the same tasks, as the sections of a config say."""

    def __init__(
        self,
        routes: Sequence[Route],
        generator: "Generator",
        chat: Chat,
        section: "EvaluationSection",
        rollout: "RolloutSection",
        *,
        max_context: int,
        seed: int,
        deadline_seconds: float = 3600.0,
        status: Callable[[str], None] = lambda text: None,
        loop: EpisodeLoop | None = None,
    ) -> None:
        self._routes, self._generator, self._chat, self._seed = routes, generator, chat, seed
        self._sampling = Sampling(
            max_tokens=section.max_tokens or rollout.max_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            stop=tuple(rollout.stop),
        )
        self._max_context, self._deadline_seconds = max_context, deadline_seconds
        self._retries, self._infrastructure_retries = rollout.retries, rollout.infrastructure_retries
        self._status, self._loop = status, loop

    def evaluate(self) -> EvaluationResult:
        """Play all tasks; see `evaluate`."""
        return evaluate(
            self._routes,
            self._generator,
            self._chat,
            self._sampling,
            self._seed,
            max_context=self._max_context,
            retries=self._retries,
            infrastructure_retries=self._infrastructure_retries,
            deadline_seconds=self._deadline_seconds,
            status=self._status,
            loop=self._loop,
        )


def evaluate(
    routes: Sequence[Route],
    generator: "Generator",
    chat: Chat,
    sampling: Sampling,
    seed: int,
    *,
    max_context: int = 0,
    retries: int,
    infrastructure_retries: int,
    deadline_seconds: float = 3600.0,
    concurrency: int = 1024,
    status: Callable[[str], None] = lambda text: None,
    loop: EpisodeLoop | None = None,
) -> EvaluationResult:
    """Play the tasks of every route, `route.samples` times each, at most `concurrency` episodes at a time.

    Randomness depends on the seed, the environment's name, task and sample alone: evaluations of one run draw alike,
    whatever was trained in between. An episode that fails is played again, then dropped and counted, never scored
    0. Raises `WhetError` where no episode of an environment came through, `WorkerError` where a worker failed.

    A generator serves one event loop at a time: while a rollout stream is open, give its `loop`.
    """
    own = loop is None
    running = loop or EpisodeLoop()
    tallies: list[Counter[str]] = []
    wanted = sum(route.samples * _count(route) for route in routes)

    def report() -> None:
        done = sum(tally["done"] + tally["failed"] + tally["infrastructure"] for tally in tallies)
        status(f"evaluation {100 * done / max(1, wanted):.0f} %")

    async def play() -> list[EnvironmentResult]:
        limit = asyncio.Semaphore(concurrency)
        return await gather_or_cancel(_evaluate(route, player(route), limit, tallies) for route in routes)

    def player(route: Route) -> Player:
        purpose = f"evaluate {route.name}"
        turn = with_stop_tokens(sampling, chat)
        return Player(
            generator, chat, turn, max_context, seed, purpose, retries, deadline_seconds, infrastructure_retries
        )

    try:
        return EvaluationResult(tuple(running.run(play(), tick=report)))
    finally:
        status("")
        if own:
            running.close()


def _count(route: Route) -> int:
    tasks = len(route.tasks())
    return min(tasks, route.limit) if route.limit else tasks


async def _evaluate(
    route: Route, player: Player, limit: asyncio.Semaphore, tallies: list[Counter[str]]
) -> EnvironmentResult:
    failures: list[EpisodeFailed] = []

    async def one(assignment: Assignment, sample: int) -> Episode | None:
        async with limit:
            try:
                return await player.episode(assignment, sample)
            except EpisodeFailed as error:
                failures.append(error)
                return None

    tasks = route.tasks()
    assignments = [Assignment(route, tasks[i], i, i) for i in range(_count(route))]
    tallies += [assignment.tally for assignment in assignments]
    played = await gather_or_cancel(
        one(assignment, sample) for assignment in assignments for sample in range(route.samples)
    )
    groups = []
    for i, assignment in enumerate(assignments):
        came_through = [e for e in played[i * route.samples : (i + 1) * route.samples] if e is not None]
        if came_through:
            groups.append(Group(assignment.index, route.name, assignment.position, tuple(came_through)))
    if not groups:
        raise WhetError(f"evaluation of {route.name!r}: every episode failed; the last: {failures[-1]}") from failures[
            -1
        ]
    return _summary(route.name, groups, len(failures))


def _summary(name: str, groups: Sequence[Group], dropped: int) -> EnvironmentResult:
    episodes = [episode for group in groups for episode in group.episodes]
    reward, interval = clustered_mean([[episode.reward for episode in group.episodes] for group in groups])
    named = {
        key: [[e.rewards[key] for e in group.episodes if key in e.rewards] for group in groups]
        for key in reward_names(episodes)
    }
    return EnvironmentResult(
        name=name,
        reward=reward,
        interval=interval,
        rewards={key: clustered_mean([values for values in rows if values])[0] for key, rows in named.items()},
        tasks=len(groups),
        episodes=len(episodes),
        dropped=dropped,
        response_length=sum(response_length(episode) for episode in episodes) / len(episodes),
        records=tuple(row for group in groups for row in record(group)),
    )


def clustered_mean(values: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Give the mean over clusters of each cluster's mean, and the half-width of its 95 % interval.

    Samples of one task are not independent of each other, tasks are: so the standard error is that of the T task
    means, s / sqrt(T) with s their unbiased standard deviation, and the interval is normal. With as many samples
    for each task this is the clustered standard error of Miller 2024, "Adding error bars to evals"
    (arXiv:2411.00640), times sqrt(T / (T - 1)). A single cluster has no interval.
    """
    means = np.array([np.mean(cluster) for cluster in values], np.float64)
    if len(means) < 2:
        return float(means.mean()), None
    return float(means.mean()), float(NORMAL_95 * means.std(ddof=1) / math.sqrt(len(means)))
