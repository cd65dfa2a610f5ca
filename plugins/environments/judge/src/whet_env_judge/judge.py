"""The environment `judge`: plays the tasks of a data set or of another environment, and lets a model judge the episode.

    task -> episode, recorded -> (value of the conversation - mean) / scale, clipped -> reward with the role's name
                              -> the environment's own rewards

With `rank`, the reward with the role's name is the rank of this value in the group, from 0 to 1. The value itself is
the reward ROLE_value of weight 0.

The judge reads the first sequence of an episode, up to the model's last response. A response that was cut by its length
is judged as if it had ended there.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from whet.component import EnvironmentFacts
from whet.config.build import build_selection
from whet.data.messages import Conversation, Message, conversation
from whet.data.model_info import ModelInfo
from whet.data.records import Episode, Reply, Task
from whet.errors import EpisodeError, Undecided
from whet.interfaces.environment import (
    Address,
    Answering,
    Environment,
    EpisodeInfo,
    GroupRewarding,
    Model,
    Scorer,
    states_answers,
)
from whet.plan.plan import facts_of
from whet_env_judge.config import JudgeConfig
from whet_env_judge.prompts import Prompts

_EXTENSIONS = ("group_rewards", "difficulty", "adapted", "observe", "state", "load")
"""Optional methods of an environment that the judge passes on."""


class Judge:
    """The environment `judge`, around a data set of prompts or another environment."""

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(self, config: JudgeConfig, roles: Mapping[str, Scorer]) -> None:
        self._config, self._scorer = config, roles[config.role]
        self._environment = _within(config, roles)
        self._own: frozenset[str] = frozenset(self._environment.reward_weights)
        if states_answers(self._environment):
            self.final_answer = cast(Answering, self._environment).final_answer
        for extension in _EXTENSIONS:
            if hasattr(self._environment, extension):
                setattr(self, extension, getattr(self._environment, extension))
        if config.rank:
            self.group_rewards = self._ranks

    @property
    def _value(self) -> str:
        """The name of the reward that `run` returns for the value of the judge."""
        return f"{self._config.role}_value" if self._config.rank else self._config.role

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        return self._environment.tasks(split)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of the judge's reward, and the weights of the environment's rewards times `environment_weight`."""
        weights, factor = self._environment.reward_weights, self._config.environment_weight
        own = {name: factor * weights.get(name, 1.0) for name in sorted(self._own)}
        raw = {self._value: 0.0} if self._config.rank else {}
        return {**own, **raw, self._config.role: self._config.judge_weight}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play the episode, then ask the judge. Returns all rewards.

        Raises `DataError` if the conversation has more tokens than the judge has positions.

        If the environment's grader cannot decide, the environment's rewards are 0 and the judge's reward stays.
        """
        recorder, role = Recorder(model), self._config.role
        try:
            own = await self._environment.run(task, recorder)
        except Undecided:
            own = dict.fromkeys(self._environment.reward_weights, 0.0)
        if role in own:
            raise EpisodeError(f"the environment has a reward {role!r}, too; give the role another name")
        self._own |= own.keys()
        value = await self._scorer.value(recorder.messages, cut=self._config.too_long == "cut")
        return {**own, self._value: self.reward(value)}

    async def _ranks(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return the rank of each episode in its group, and the rewards by which the wrapped environment compares."""
        values = [episode.rewards[self._value] for episode in episodes]
        ranks = [{self._config.role: win_rate(values, i)} for i in range(len(values))]
        if not isinstance(self._environment, GroupRewarding):
            return ranks
        own = await self._environment.group_rewards(task, episodes)
        return [{**rank, **further} for rank, further in zip(ranks, own, strict=True)]

    def reward(self, value: float) -> float:
        """Return the reward for a value of the judge: shifted, scaled, clipped."""
        reward = (value - self._config.mean) / self._config.scale
        low, high = self._config.clip or (reward, reward)
        return min(max(reward, low), high)

    def close(self) -> None:
        """Close the wrapped environment."""
        self._environment.close()


class Recorder:
    """A model that records its conversation."""

    def __init__(self, model: Model, messages: Sequence[Message] = ()) -> None:
        self._model = model
        self.messages = list(messages)
        """The conversation so far. It ends with a response of the model."""

    @property
    def episode(self) -> EpisodeInfo:
        """See `Model.episode`."""
        return self._model.episode

    async def reply(self, messages: str | Message | Sequence[Message], **how: Any) -> Reply:
        """Return the model's reply, and record the messages and the reply. `how` is as in `Model.reply`."""
        reply = await self._model.reply(messages, **how)
        self.messages += [*conversation(messages), Message("assistant", reply.text)]
        return reply

    def fork(self, agent: str = "") -> "Recorder":
        """Return a model for another sequence, which is not judged."""
        return Recorder(self._model.fork(agent) if agent else self._model.fork(), self.messages)

    def reward(self, name: str, value: float, **address: Any) -> None:
        """See `Model.reward`."""
        self._model.reward(name, value, **address)

    def record(self, name: str, value: Any) -> None:
        """See `Model.record`."""
        self._model.record(name, value)

    @asynccontextmanager
    async def endpoint(self, *, ignore: Collection[str] = ()) -> AsyncIterator[Address]:
        """Yield an address for an external agent. The agent's first conversation is judged."""
        async with self._model.endpoint(ignore=ignore) as address:
            yield address
            self.messages = list(next(iter(address.conversations()), self.messages))


def win_rate(values: Sequence[float], one: int) -> float:
    """Return the share of the other values that are lower than a value. An equal value counts half. Alone: 0.5."""
    others = [value for i, value in enumerate(values) if i != one]
    won = sum((values[one] > other) + 0.5 * (values[one] == other) for other in others)
    return won / len(others) if others else 0.5


def _within(config: JudgeConfig, roles: Mapping[str, Scorer]) -> Environment:
    """Return the wrapped environment, built with the roles that it needs."""
    if config.environment is None:
        return Prompts(config)
    needs = facts_of(config.environment, ModelInfo("", {}), EnvironmentFacts).roles
    built = build_selection(config.environment, *([{name: roles[name] for name in needs}] if needs else []))
    return cast(Environment, built)
