"""The environment `judge`: plays the tasks of a data set or of another environment, and lets a model judge the episode.

    task -> episode, recorded -> (value of the conversation - mean) / scale, clipped -> reward with the role's name
                              -> the environment's own rewards

The judge reads the first sequence of an episode, up to the model's last response. A response that was cut by its length
is judged as if it had ended there.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

from whet.component import EnvironmentFacts
from whet.config.build import build_selection
from whet.data.messages import Conversation, Message, conversation
from whet.data.model_info import ModelInfo
from whet.data.records import Reply, Task
from whet.errors import EpisodeError, Undecided
from whet.interfaces.environment import Address, Answering, Environment, Model, states_answers
from whet.plan.plan import facts_of
from whet.rollout.scorer import Scorer
from whet_env_judge.config import JudgeConfig
from whet_env_judge.prompts import Prompts


class Judge:
    """The environment `judge`, around a data set of prompts or another environment."""

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(self, config: JudgeConfig, roles: Mapping[str, Scorer]) -> None:
        self._config, self._scorer = config, roles[config.role]
        self._environment = _within(config, roles)
        self._own: frozenset[str] = frozenset(self._environment.reward_weights)
        if states_answers(self._environment):
            self.final_answer = cast(Answering, self._environment).final_answer

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        return self._environment.tasks(split)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of the judge's reward, and the weights of the environment's rewards times `environment_weight`."""
        weights, factor = self._environment.reward_weights, self._config.environment_weight
        own = {name: factor * weights.get(name, 1.0) for name in sorted(self._own)}
        return {**own, self._config.role: self._config.judge_weight}

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
        return {**own, role: self.reward(value)}

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

    async def reply(self, messages: str | Message | Sequence[Message]) -> Reply:
        """Return the model's reply, and record the messages and the reply."""
        reply = await self._model.reply(messages)
        self.messages += [*conversation(messages), Message("assistant", reply.text)]
        return reply

    def fork(self) -> "Recorder":
        """Return a model for another sequence, which is not judged."""
        return Recorder(self._model.fork(), self.messages)

    @asynccontextmanager
    async def endpoint(self, *, ignore: Collection[str] = ()) -> AsyncIterator[Address]:
        """Yield an address for an external agent. The agent's first conversation is judged."""
        async with self._model.endpoint(ignore=ignore) as address:
            yield address
            self.messages = list(next(iter(address.conversations()), self.messages))


def _within(config: JudgeConfig, roles: Mapping[str, Scorer]) -> Environment:
    """Return the wrapped environment, built with the roles that it needs."""
    if config.environment is None:
        return Prompts(config)
    needs = facts_of(config.environment, ModelInfo("", {}), EnvironmentFacts).roles
    built = build_selection(config.environment, *([{name: roles[name] for name in needs}] if needs else []))
    return cast(Environment, built)
