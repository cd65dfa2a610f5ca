"""Plays every task of some environments, several times each, and scores them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from whet.data.records import Episode, Sampling
from whet.errors import ConfigError, WhetError
from whet.evaluation.result import EvaluationResult, judge
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import Endpoints
from whet.interfaces.environment import GroupRewarding
from whet.plugins.endpoints import InstalledEndpoints
from whet.rollout.episode import EpisodeFailed, Player, with_stop_tokens
from whet.rollout.event_loop import EpisodeLoop, gather_or_cancel
from whet.rollout.gate import Gate
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route

if TYPE_CHECKING:
    from whet.interfaces.generator import Generator


def evaluate(
    routes: Sequence[Route], generator: "Generator", chat: Chat, sampling: Sampling, seed: int, *,
    max_context: int = 0, retries: int, infrastructure_retries: int, deadline_seconds: float = 3600.0,
    concurrency: int = 1024, status: Callable[[str], None] = lambda text: None, loop: EpisodeLoop | None = None,
    endpoints: Endpoints | None = None,
) -> EvaluationResult:  # fmt: skip
    """Play the tasks of every route, `route.samples` times each, with at most `concurrency` episodes at a time.

    Randomness depends only on the seed, the environment's name, task and sample: all evaluations of one run draw alike,
    whatever was trained in between. A failed episode is played again, and finally dropped and counted, never scored 0.
    Raises `WhetError` if no episode of an environment succeeded (at once, if its first tasks failed alike), and
    `WorkerError` if a worker failed.

    A generator serves one event loop at a time: while a rollout stream is open, pass its `loop`.
    """
    own = loop is None
    running, gate = loop or EpisodeLoop(), Gate()
    opened_by = endpoints or InstalledEndpoints()
    tallies: list[Counter[str]] = []
    wanted = sum(route.samples * _count(route) for route in routes)

    def report() -> None:
        done = sum(tally["done"] + tally["failed"] + tally["infrastructure"] for tally in tallies)
        status(f"evaluation, {done} of {wanted} episodes finished")
        running.refuse_overdue(gate)

    async def play() -> list[Played]:
        limit = asyncio.Semaphore(concurrency)
        return await gather_or_cancel(_play(route, player(route), limit, tallies) for route in routes)

    def player(route: Route) -> Player:
        purpose = f"evaluate {route.name}"
        turn = with_stop_tokens(route.sampling(sampling), chat)
        return Player(
            generator, chat, turn, max_context, seed, purpose, retries, deadline_seconds, infrastructure_retries,
            endpoints=opened_by, gate=gate, training=False,
        )  # fmt: skip

    try:
        played = running.run(play(), tick=report)
    finally:
        status("")
        if own:
            running.close()
    # On the caller's thread: votes over subsets of many samples would block the loop.
    return EvaluationResult(tuple(judge(*of_route) for of_route in played), sampling, seed)


def _count(route: Route) -> int:
    count = min(tasks := len(route.tasks()), route.limit or tasks)
    if count > 1_000_000:  # all tasks of an evaluation are in memory, and an endless split says that it has more
        raise ConfigError(f"evaluation of {route.name!r}: its split {route.split!r} has {tasks:,} tasks; set `limit`")
    return count


Played = tuple[Route, tuple[tuple[Episode, ...], ...], tuple[EpisodeFailed, ...]]
"""A route, the successful episodes of each of its tasks, and the failures of the others."""


async def _play(route: Route, player: Player, limit: asyncio.Semaphore, tallies: list[Counter[str]]) -> Played:
    failures: list[EpisodeFailed] = []

    async def one(assignment: Assignment, sample: int) -> Episode | None:
        async with limit:
            try:
                episode = await player.episode(assignment, sample)
            except EpisodeFailed as error:
                failures.append(error)
                return None
        lacks = episode.undecided or episode.context_full or any(t.rewards is not None for t in episode.trajectories)
        if not (lacks or isinstance(route.environment, GroupRewarding)):
            route.scoring.passing(episode)  # raises now, rather than at the end, if there is no such reward
        return episode

    async def compared(assignment: Assignment, episodes: list[Episode]) -> tuple[Episode, ...]:
        try:
            return tuple(await player.group_rewarded(assignment, episodes))
        except EpisodeFailed as error:
            failures.extend([error] * len(episodes))
            return ()

    tasks = route.tasks()
    assignments = [Assignment(route, route.task(tasks, i), i, i) for i in range(_count(route))]
    tallies += [assignment.tally for assignment in assignments]
    played = await gather_or_cancel(
        one(assignment, sample) for assignment in assignments for sample in range(route.samples)
    )
    samples = [played[i * route.samples : (i + 1) * route.samples] for i in range(len(assignments))]
    found = [[episode for episode in of_task if episode is not None] for of_task in samples]
    groups = tuple(await gather_or_cancel(map(compared, assignments, found)))
    if not any(groups):
        last = failures[-1]
        raise WhetError(f"evaluation of {route.name!r}: every episode failed; the last: {last}") from last
    return route, groups, tuple(failures)
