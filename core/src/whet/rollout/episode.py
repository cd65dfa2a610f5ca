"""One episode: an environment drives the model. A failed episode is played again; a finished one becomes a record."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, nullcontext
from copy import deepcopy
from inspect import isawaitable
from itertools import count
from typing import Any

from attrs import evolve, field, frozen

from whet.data.records import Episode, Group, Sampling, gold_answer
from whet.errors import ContextFull, EpisodeError, InfrastructureError, Undecided, WhetError, WorkerError, in_words
from whet.interfaces.chat import Chat
from whet.interfaces.environment import GroupRewarding, checked_rewards, stated_answer
from whet.interfaces.undecided import note_undecided, noted
from whet.rollout.event_loop import gather_or_cancel
from whet.rollout.fail_fast import BrokenEnvironment, FailFast, is_infrastructure, ungrouped
from whet.rollout.recorded import Assignment, RecordedModel, Sequences
from whet.rollout.rewards import addressed, total_reward, with_rewards
from whet.rollout.routing import Route


class EpisodeFailed(WhetError):  # noqa: N818 - the field's word is "failed episode"
    """An episode failed on every attempt. Names environment, task and sample; its cause is the last error."""

    def __init__(self, message: str, infrastructure: bool = False) -> None:
        super().__init__(message)
        self.infrastructure = infrastructure
        """Whether the infrastructure failed, rather than the episode."""


PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 30.0
"""Pause before an episode whose infrastructure failed is played again. It is four times as long each time."""


@frozen(eq=False)
class Player(Sequences):
    """Plays the episodes of one stream, or of one evaluation."""

    retries: int
    """How often a failed episode is played again."""
    deadline_seconds: float
    """Limit of one attempt at an episode, all its turns included."""
    infrastructure_retries: int = 0
    """How often an episode is played again whose infrastructure failed."""
    fail_fast: dict[str, FailFast] = field(factory=dict)
    """For each environment, the check that ends a run if all first episodes fail. Filled while playing."""

    async def group(self, assignment: Assignment, samples: int, greedy: bool = False) -> Group:
        """Play all episodes of a group concurrently. The first one that finally fails cancels the others.

        `greedy`: play one more episode, at temperature 0. Its number follows the last sample's, so the randomness of
        the samples is the same with and without it.
        """
        playing = [self.episode(assignment, sample) for sample in range(samples)]
        if greedy:
            likeliest = evolve(self, sampling=evolve(self.sampling, temperature=0.0))
            playing.append(likeliest.episode(assignment, samples))
        episodes = await gather_or_cancel(playing)
        episodes = await self.group_rewarded(assignment, episodes)
        sampled, further = episodes[:samples], episodes[samples:]
        one = further[0] if further else None
        return Group(assignment.index, assignment.route.name, assignment.position, tuple(sampled), one)

    async def group_rewarded(self, assignment: Assignment, episodes: list[Episode]) -> list[Episode]:
        """Return the episodes of a group with the rewards that compare them, if the environment gives such rewards.

        Warn of a reward in `reward_weights` that no episode has. Raises `EpisodeFailed`.
        """
        if isinstance(assignment.route.environment, GroupRewarding) and episodes:
            episodes = await self._compared(assignment, assignment.route.environment, episodes)
        _check_names(assignment.route, episodes)
        return episodes

    async def _compared(
        self, assignment: Assignment, environment: GroupRewarding, episodes: list[Episode]
    ) -> list[Episode]:
        for failures in count(1):
            try:
                async with self._time_limit():
                    coroutine = environment.group_rewards(assignment.task, tuple(episodes))
                    given = await _coroutine(coroutine, "group_rewards", assignment.route.name)
                if not isinstance(given, Sequence) or len(given) != len(episodes):
                    found = f"{len(given)} items" if isinstance(given, Sequence) else repr(given)[:60]
                    wanted = f"wanted a mapping for each of {len(episodes)} episodes"
                    raise EpisodeError(f"group_rewards gave {found}, {wanted}")
                further = [checked_rewards(one, assignment.route.name) for one in given]
                weights = assignment.route.environment.reward_weights
                return [with_rewards(episode, one, weights) for episode, one in zip(episodes, further, strict=True)]
            except (WorkerError, BrokenEnvironment):
                raise
            except BaseException as error:  # as of an episode
                if isinstance(error, asyncio.CancelledError) and (now := asyncio.current_task()) and now.cancelling():
                    raise
                kind = "infrastructure" if is_infrastructure(error) else "failed"
                if kind == "failed" or failures > self.infrastructure_retries:
                    assignment.tally.update({"done": -len(episodes), kind: len(episodes)})
                    raise self._failure(assignment, "group_rewards", failures, error) from error
            assignment.tally["retried"] += 1
            await _pause(failures)
        raise AssertionError

    async def episode(self, assignment: Assignment, sample: int) -> Episode:
        """Play an episode. If it fails, play it again with fresh randomness. Raises `EpisodeFailed` after the last
        attempt.

        If its infrastructure fails, the episode is played again with the same randomness, so that a temporary failure
        does not change the result. If the infrastructure fails again, the response itself may be the cause (e.g. it
        hangs a grader), so all further attempts have fresh randomness. If a request may be the reason why replicas
        die, its episode is not played again. `WorkerError` and `BrokenEnvironment` are raised at once.
        """
        name = assignment.route.name
        fail_fast = self.fail_fast.setdefault(name, FailFast(name))
        attempt, failures = 0, Counter[str]()
        cause: BaseException
        while True:
            try:
                with fail_fast.first_attempt(assignment.index) if not failures else nullcontext():
                    episode = await self._attempt(assignment, sample, attempt)
            except (WorkerError, BrokenEnvironment):
                raise
            except asyncio.CancelledError as error:
                if (current := asyncio.current_task()) and current.cancelling():
                    raise
                cause = error
            # SystemExit, as of a grader that calls exit(), would end the event loop.
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                cause = error
            else:
                assignment.tally["done"] += 1
                assignment.tally.update(["undecided"] * bool(episode.undecided))
                return episode
            kind = "infrastructure" if is_infrastructure(cause) else "failed"
            failures[kind] += 1
            allowed = self.infrastructure_retries if kind == "infrastructure" else self.retries
            if failures[kind] > allowed or not getattr(cause, "again", True):
                assignment.tally[kind] += 1
                raise self._failure(assignment, f"sample {sample}", failures.total(), cause) from cause
            assignment.tally["retried"] += 1
            attempt += kind == "failed" or failures[kind] > 1
            await fail_fast.before_another()
            if kind == "infrastructure":
                await _pause(failures[kind])

    def _failure(self, assignment: Assignment, what: str, failures: int, cause: BaseException) -> EpisodeFailed:
        times = f"{failures} times" if failures > 1 else "once"
        return EpisodeFailed(
            f"environment {assignment.route.name!r}, task {assignment.position}, {what} failed {times}; "
            f"last: {in_words(cause)}",
            is_infrastructure(cause),
        )

    async def _attempt(self, assignment: Assignment, sample: int, attempt: int) -> Episode:
        route = assignment.route
        model = RecordedModel(self, assignment, sample, attempt)
        with noted() as undecided:
            try:
                async with self._time_limit():
                    with ungrouped():
                        # Each episode has data of its own: what one changes must not reach another one of its group.
                        task = evolve(assignment.task, data=deepcopy(assignment.task.data))
                        given = await _coroutine(route.environment.run(task, model), "run", route.name)
                rewards = checked_rewards(given, route.name)
                if not (rewards or model.recorded or isinstance(route.environment, GroupRewarding)):
                    route.warn("an episode has no rewards, which counts as 0")
            except (Undecided, ContextFull) as error:
                rewards = dict.fromkeys(route.environment.reward_weights, 0.0)
                note_undecided(error)
        model.over.set()
        if model.failures:
            raise model.failures[0]
        sequences = [sequence for sequence in model.sequences if sequence.turns]
        if not sequences:
            raise EpisodeError("it ended without asking the model anything")
        played = {i: sequence.trajectories() for i, sequence in enumerate(model.sequences) if sequence.turns}
        weights = route.environment.reward_weights
        trajectories, rewards = addressed(played, model.recorded, rewards, weights)
        return Episode(
            environment=route.name, task=assignment.position, sample=sample, trajectories=trajectories,
            rewards=rewards, reward=total_reward(rewards, weights),
            turns=sum(sequence.turns for sequence in sequences),
            messages=tuple((message.role, message.plain) for message in sequences[0].messages),
            task_id=assignment.task.id,
            answer=None if self.training else stated_answer(route.environment, sequences[0].messages),
            undecided=tuple(undecided), gold=gold_answer(assignment.task), difficulty=assignment.difficulty,
            recorded=model.log,
        )  # fmt: skip

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        """Raise `InfrastructureError` in place of `TimeoutError` if the body takes longer than an episode may take."""
        try:
            async with self.gate.time_limit(self.deadline_seconds) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            raise InfrastructureError(
                f"it was not over after {self.deadline_seconds:g} seconds (cluster.deadlines.episode)"
            ) from None


async def _pause(failures: int) -> None:
    await asyncio.sleep(min(PAUSE_SECONDS * 4 ** (failures - 1), LONGEST_PAUSE_SECONDS))


def _coroutine(found: Any, method: str, environment: str) -> Awaitable[Any]:
    """Return what a method of an environment returned, or raise `BrokenEnvironment` if it cannot be awaited."""
    if not isawaitable(found):
        words = f"`{method}` returned {type(found).__name__} and no coroutine; write `async def {method}`"
        raise BrokenEnvironment(f"environment {environment!r}: {words}")
    return found


def _check_names(route: Route, episodes: Sequence[Episode]) -> None:
    """Warn if a weight names a reward that no episode has had so far, while other rewards have no weight."""
    weights, decided = route.environment.reward_weights, [e for e in episodes if not (e.undecided or e.context_full)]
    route.given.update(*(episode.rewards for episode in decided))
    missing, unweighted = weights.keys() - route.given, sorted(route.given - weights.keys())
    if decided and missing and unweighted:
        words = f"`reward_weights` names the reward {min(missing)!r}, which no episode has so far"
        route.warn(words, f"; {', '.join(unweighted)} have no weight, which counts as 1. Is the name misspelled?")


def with_stop_tokens(sampling: Sampling, chat: Chat) -> Sampling:
    """Return the sampling with the chat template's end-of-turn tokens as stop tokens."""
    return evolve(sampling, stop_tokens=(*chat.stop_tokens, *sampling.stop_tokens))
