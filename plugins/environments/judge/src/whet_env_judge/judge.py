"""The environment `judge`: plays the tasks of a data set or of another environment, and has what came of it judged.

    task -> episode, overheard -> (value of the conversation - mean) / scale, clipped -> reward of the role's name
                               -> the environment's own rewards, beside it

Judged is the first sequence of an episode, up to the model's last words; one that was cut is judged as if it had ended.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

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
    """The environment `judge`."""

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(self, config: JudgeConfig, roles: Mapping[str, Scorer]) -> None:
        self._config, self._scorer = config, roles[config.role]
        self._environment = _within(config, roles)
        self._own: frozenset[str] = frozenset(self._environment.reward_weights)
        if states_answers(self._environment):
            self.final_answer = cast(Answering, self._environment).final_answer

    def tasks(self, split: str) -> Sequence[Task]:
        """Give the tasks of a split."""
        return self._environment.tasks(split)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The judge's, and those of the environment's own rewards that were seen, times `environment_weight`."""
        weights, factor = self._environment.reward_weights, self._config.environment_weight
        own = {name: factor * weights.get(name, 1.0) for name in sorted(self._own)}
        return {**own, self._config.role: self._config.judge_weight}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play the episode, then ask the judge. Raises `DataError` where it cannot read the conversation.

        Where the environment's grader cannot decide, its own rewards are 0 and the judge's stands.
        """
        overheard, role = Overheard(model), self._config.role
        try:
            own = await self._environment.run(task, overheard)
        except Undecided:
            own = dict.fromkeys(self._environment.reward_weights, 0.0)
        if role in own:
            raise EpisodeError(f"the environment has a reward {role!r}, too; give the role another name")
        self._own |= own.keys()
        value = await self._scorer.value(overheard.messages, cut=self._config.too_long == "cut")
        return {**own, role: self.reward(value)}

    def reward(self, value: float) -> float:
        """Turn what the judge said into a reward."""
        reward = (value - self._config.mean) / self._config.scale
        low, high = self._config.clip or (reward, reward)
        return min(max(reward, low), high)

    def close(self) -> None:
        """Close the environment within."""
        self._environment.close()


class Overheard:
    """A model whose conversation is kept."""

    def __init__(self, model: Model, messages: Sequence[Message] = ()) -> None:
        self._model = model
        self.messages = list(messages)
        """The conversation so far, which ends with the model's words."""

    async def reply(self, messages: str | Message | Sequence[Message]) -> Reply:
        """Ask, and keep both."""
        reply = await self._model.reply(messages)
        self.messages += [*conversation(messages), Message("assistant", reply.text)]
        return reply

    def fork(self) -> "Overheard":
        """Start another sequence, which is not judged."""
        return Overheard(self._model.fork(), self.messages)

    @asynccontextmanager
    async def endpoint(self, *, ignore: Collection[str] = ()) -> AsyncIterator[Address]:
        """Give a foreign agent an address; its first conversation is the one that is judged."""
        async with self._model.endpoint(ignore=ignore) as address:
            yield address
            self.messages = list(next(iter(address.conversations()), self.messages))


def _within(config: JudgeConfig, roles: Mapping[str, Scorer]) -> Environment:
    """Build the environment that is judged, with the roles where it asks for some."""
    if config.environment is None:
        return Prompts(config)
    needs = facts_of(config.environment, ModelInfo("", {})).roles
    built = build_selection(config.environment, *([{name: roles[name] for name in needs}] if needs else []))
    return cast(Environment, built)
