"""The environment `rewarded`: plays the tasks of a data set or of another environment, and adds rewards.

    task -> episodes of a group, by the other environment -> its own rewards, times environment_weight
                                                          -> each reward of `rewards`, by its name and weight
                                                          -> truncation

It reads finished episodes, so it does not matter how they are played: by turns, forks or a foreign agent. Rewards see
the rewards that stand before them in the list, and those of the environment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from whet.data.messages import Conversation, Tools, conversation
from whet.data.records import Episode, Task
from whet.errors import ContextFull, EpisodeError, Undecided, WhetError, in_words
from whet.interfaces.environment import Answering, GroupRewarding, Model, states_answers
from whet.interfaces.undecided import note_undecided
from whet.rollout.collate import response_length
from whet.rollout.rewards import total_reward
from whet_data.finished import Finished, GroupReward
from whet_data.source import opened
from whet_env_rewards.combined import built, closed, compared, graded
from whet_env_rewards.config import RewardedConfig

_EXTENSIONS = ("difficulty", "adapted", "observe", "state", "load")
"""Optional methods of an environment that are passed on."""
TRUNCATION = "truncation"


class Rewarded:
    """The environment `rewarded`, around a data set of prompts or another environment."""

    final_answer: Callable[[Conversation], str | None] | None = None

    def __init__(self, config: RewardedConfig, roles: Mapping[str, Any] | None = None) -> None:
        self._config, self._inner = config, opened(config, roles or {})
        self._own = set[str]()
        """The rewards that the environment has given or recorded."""
        self._rewards = {section.label: built(section) for section in config.rewards}
        self._weights = {section.label: section.weight for section in config.rewards}
        if states_answers(self._inner):
            self.final_answer = cast(Answering, self._inner).final_answer
        for extension in _EXTENSIONS:
            if hasattr(self._inner, extension):
                setattr(self, extension, getattr(self._inner, extension))

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weights of the rewards, and the weights of the environment's rewards times `environment_weight`."""
        factor, truncation = self._config.environment_weight, self._config.truncation_factor < 1
        weights = self._inner.reward_weights
        own = {name: factor * weights.get(name, 1.0) for name in sorted(self._own | weights.keys())}
        return {**own, **self._weights, **({TRUNCATION: 1.0} if truncation else {})}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        return self._inner.tasks(split)

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play an episode. Returns the environment's own rewards, 0 each if it is undecided or has no room left."""
        try:
            own = await self._inner.run(task, cast(Model, _Learning(model, self._own)))
        except (Undecided, ContextFull) as error:
            note_undecided(error)
            own = dict.fromkeys(self._inner.reward_weights, 0.0)
        self._own |= own.keys()
        return own

    async def group_rewards(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return the further rewards of each episode of a group."""
        for episode in episodes:  # of other processes, maybe
            self._own |= episode.rewards.keys()
        found: list[dict[str, float]] = [{} for _ in episodes]
        if isinstance(self._inner, GroupRewarding):
            found = [dict(own) for own in await self._inner.group_rewards(task, episodes)]
            self._own.update(*found)
        for name, reward in self._rewards.items():
            finished = [self._finished(task, e, own) for e, own in zip(episodes, found, strict=True)]
            with _named(name):
                if isinstance(reward, GroupReward):
                    values = await compared(reward, finished)
                else:
                    values = [await _decided(reward, one) for one in finished]
            if len(values) != len(finished):
                raise EpisodeError(f"the reward {name!r} gave {len(values)} values for {len(finished)} episodes")
            for own, one, value in zip(found, finished, values, strict=True):
                if name in one.rewards:
                    raise EpisodeError(f"the environment has a reward {name!r}, too; give this one another `name`")
                own[name] = value
        if self._config.truncation_factor < 1:
            for own, episode in zip(found, episodes, strict=True):
                own[TRUNCATION] = self._truncation(episode, own)
        return found

    def close(self) -> None:
        """Close the environment and the rewards."""
        self._inner.close()
        for reward in self._rewards.values():
            closed(reward)

    def _truncation(self, episode: Episode, further: Mapping[str, float]) -> float:
        """Return the reward that scales the whole reward of a cut episode by `truncation_factor`, else 0."""
        whole = total_reward({**episode.rewards, **further}, self.reward_weights)
        return (self._config.truncation_factor - 1) * whole if _cut(episode) else 0.0

    def _finished(self, task: Task, episode: Episode, further: Mapping[str, float]) -> Finished:
        messages = conversation({"role": role, "content": content} for role, content in episode.messages)
        text = next((message.text for message in reversed(messages) if message.role == "assistant"), "")
        rewards = {**episode.rewards, **further}
        return Finished(text, task.data, messages, response_length(episode), _cut(episode), rewards)


class _Learning:
    """A model that learns the names of the rewards that the environment records."""

    def __init__(self, model: Model, names: set[str]) -> None:
        self._model, self._names = model, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def reward(self, name: str, value: float, **address: Any) -> None:
        """See `Model.reward`."""
        self._model.reward(name, value, **address)
        self._names.add(name)

    def with_tools(self, tools: Tools) -> "_Learning":
        """See `Model.with_tools`."""
        return _Learning(self._model.with_tools(tools), self._names)

    def fork(self, agent: str = "") -> "_Learning":
        """See `Model.fork`."""
        return _Learning(self._model.fork(agent), self._names)


def _cut(episode: Episode) -> bool:
    return any(trajectory.stop == "length" for trajectory in episode.trajectories)


@contextmanager
def _named(reward: str) -> Iterator[None]:
    """Name the reward in an error of its code. The infrastructure's errors keep their type."""
    try:
        yield
    except (WhetError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        raise EpisodeError(f"the reward {reward!r} failed: {in_words(error)}") from error


async def _decided(reward: Any, episode: Finished) -> float:
    """Return a reward, or 0 if its grader cannot decide."""
    try:
        return await graded(reward, episode)
    except Undecided:
        return 0.0
