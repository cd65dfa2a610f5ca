"""The environment `judge`: plays the tasks of a data set or of another environment, and lets a model value the episode.

    task -> episode, recorded -> (value of the conversation - mean) / scale, clipped -> reward with the role's name
                              -> the environment's own rewards

With `rank`, the reward with the role's name is the rank of this value in the group, from 0 to 1. The value itself is
the reward ROLE_value of weight 0.

The judge reads the first sequence of an episode, up to the model's last response. A response that was cut by its length
is judged as if it had ended there.
"""

from collections.abc import Mapping, Sequence

from whet.data.records import Episode, Task
from whet.interfaces.environment import Model, Scorer
from whet_env_judge.config import JudgeConfig
from whet_env_judge.judged import Judged, Recorder


class Judge(Judged):
    """The environment `judge`, around a data set of prompts or another environment."""

    def __init__(self, config: JudgeConfig, roles: Mapping[str, Scorer]) -> None:
        super().__init__(config, roles, (config.role,))
        self._config, self._scorer = config, roles[config.role]
        if config.rank:
            self.group_rewards = self._ranks

    @property
    def _value(self) -> str:
        """Return the name of the reward that `run` returns for the value of the judge."""
        return f"{self._config.role}_value" if self._config.rank else self._config.role

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of the judge's reward, and the weights of the environment's rewards times `environment_weight`."""
        raw = {self._value: 0.0} if self._config.rank else {}
        return {**self.own_weights(), **raw, self._config.role: self._config.judge_weight}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play the episode, then ask the judge. Returns all rewards.

        Raises `DataError` if the conversation has more tokens than the judge has positions.

        If the environment's grader cannot decide, the environment's rewards are 0 and the judge's reward stays.
        """
        recorder = Recorder(model)
        own = await self.played(task, recorder)
        value = await self._scorer.value(recorder.messages, cut=self._config.too_long == "cut")
        return {**own, self._value: self.reward(value)}

    async def _ranks(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        """Return the rank of each episode in its group, and the rewards by which the wrapped environment compares."""
        values = [episode.rewards[self._value] for episode in episodes]
        own = await self.compared_within(task, episodes)
        return [{self._config.role: win_rate(values, i), **further} for i, further in enumerate(own)]

    def reward(self, value: float) -> float:
        """Return the reward for a value of the judge: shifted, scaled, clipped."""
        reward = (value - self._config.mean) / self._config.scale
        low, high = self._config.clip or (reward, reward)
        return min(max(reward, low), high)


def win_rate(values: Sequence[float], one: int) -> float:
    """Return the share of the other values that are lower than a value. An equal value counts half. Alone: 0.5."""
    others = [value for i, value in enumerate(values) if i != one]
    won = sum((values[one] > other) + 0.5 * (values[one] == other) for other in others)
    return won / len(others) if others else 0.5
