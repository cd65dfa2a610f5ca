"""What all judges share: they play the tasks of a data set or of another environment, and record the conversation."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from whet.data.messages import Conversation, Message, Tools, conversation
from whet.data.records import Episode, Reply, Task
from whet.errors import ContextFull, EpisodeError, Undecided
from whet.interfaces.environment import (
    Address,
    Answering,
    EpisodeInfo,
    GroupRewarding,
    Model,
    states_answers,
)
from whet.interfaces.undecided import note_undecided
from whet_data.source import opened
from whet_env_judge.config import JudgedConfig

_EXTENSIONS = ("difficulty", "adapted", "observe", "state", "load")
"""Optional methods of an environment that a judge passes on."""


class Judged:
    """A data set of prompts or another environment, whose episodes a subclass judges."""

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(self, config: JudgedConfig, roles: Mapping[str, Any], rewards: Collection[str]) -> None:
        self._environment = opened(config, roles)
        self._rewards, self._factor = frozenset(rewards), config.environment_weight
        self._own = set[str]()
        """The rewards that the environment has given or recorded."""
        if states_answers(self._environment):
            self.final_answer = cast(Answering, self._environment).final_answer
        if isinstance(self._environment, GroupRewarding):
            self.group_rewards = self.compared_within
        for extension in _EXTENSIONS:
            if hasattr(self._environment, extension):
                setattr(self, extension, getattr(self._environment, extension))

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        return self._environment.tasks(split)

    def close(self) -> None:
        """Close the wrapped environment."""
        self._environment.close()

    def own_weights(self) -> dict[str, float]:
        """Return the weights of the environment's rewards times `environment_weight`."""
        weights = self._environment.reward_weights
        return {name: self._factor * weights.get(name, 1.0) for name in sorted(self._own | weights.keys())}

    async def played(self, task: Task, recorder: "Recorder") -> Mapping[str, float]:
        """Play an episode, and return the environment's own rewards.

        They are 0 if its grader cannot decide, or if the context has no room left.
        """
        try:
            own = await self._environment.run(task, recorder)
        except (Undecided, ContextFull) as error:
            note_undecided(error)
            own = dict.fromkeys(self._environment.reward_weights, 0.0)
        if clash := sorted(self._rewards & own.keys()):
            raise EpisodeError(f"the environment has a reward {clash[0]!r}, too; give the role another name")
        self._own |= own.keys() | recorder.names
        return own

    async def compared_within(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return the rewards by which the wrapped environment compares the episodes of a group, if there are any."""
        if not isinstance(self._environment, GroupRewarding):
            return [{} for _ in episodes]
        for episode in episodes:  # of other processes, maybe
            self._own |= episode.rewards.keys() - self._rewards
        found = await self._environment.group_rewards(task, episodes)
        self._own.update(*(one for one in found or () if isinstance(one, Mapping)))  # core refuses others
        return found


class Recorder:
    """A model that records its conversation."""

    def __init__(self, model: Model, messages: Sequence[Message] = (), names: set[str] | None = None) -> None:
        self._model = model
        self.messages = list(messages)
        """The conversation so far. It ends with a response of the model."""
        self.names = set[str]() if names is None else names
        """The names of the rewards that all sequences have recorded."""

    @property
    def episode(self) -> EpisodeInfo:
        """See `Model.episode`."""
        return self._model.episode

    async def reply(self, messages: str | Message | Sequence[Message], **how: Any) -> Reply:
        """Return the model's reply, and record the messages and the reply. `how` is as in `Model.reply`."""
        reply = await self._model.reply(messages, **how)
        self.messages += [*conversation(messages), Message("assistant", reply.text)]
        return reply

    def with_tools(self, tools: Tools) -> "Recorder":
        """Return a model for a sequence with tools. If nothing was said before, its conversation is the judged one."""
        other = Recorder(self._model.with_tools(tools), (), self.names)
        other.messages = other.messages if self.messages else self.messages
        return other

    def fork(self, agent: str = "") -> "Recorder":
        """Return a model for another sequence, which is not judged."""
        forked = self._model.fork(agent) if agent else self._model.fork()
        return Recorder(forked, self.messages, self.names)

    def reward(self, name: str, value: float, **address: Any) -> None:
        """See `Model.reward`."""
        self._model.reward(name, value, **address)
        self.names.add(name)

    def record(self, name: str, value: Any) -> None:
        """See `Model.record`."""
        self._model.record(name, value)

    @asynccontextmanager
    async def endpoint(self, *, ignore: Collection[str] = ()) -> AsyncIterator[Address]:
        """Yield an address for an external agent. The agent's first conversation is judged."""
        async with self._model.endpoint(ignore=ignore) as address:
            yield address
            self.messages = list(next(iter(address.conversations()), self.messages))
