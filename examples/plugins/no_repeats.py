"""A reward for any environment: a price on repeated phrases, beside the environment's own rewards.

It reads the finished episodes of a group, so it works however the environment plays: turns, forks or a foreign agent.
"""

from attrs import field, frozen

import whet
from whet.config.build import build_selection
from whet.config.sections import selection

OPTIONAL = ("final_answer", "difficulty", "adapted", "observe", "state", "load")
"""Methods that an environment may have, and that this one then has too."""


@frozen
class NoRepeatsConfig:
    """Another environment, with a price on repeated phrases."""

    environment: whet.Selection = selection("environments")
    """The environment that is played."""
    reward_weight: float = field(default=-0.1, validator=whet.between(-1000, 1000), kw_only=True)
    """The weight of this reward. Those of the environment keep theirs."""


class NoRepeats:
    def __init__(self, config):
        self._inner, self._weight = build_selection(config.environment), config.reward_weight
        self.tasks, self.run, self.close = self._inner.tasks, self._inner.run, self._inner.close
        for name in OPTIONAL:
            if hasattr(self._inner, name):
                setattr(self, name, getattr(self._inner, name))

    @property
    def reward_weights(self):
        return {**self._inner.reward_weights, "repeated": self._weight}

    async def group_rewards(self, task, episodes):
        own = [{} for _ in episodes]
        if hasattr(self._inner, "group_rewards"):
            own = await self._inner.group_rewards(task, episodes)
        last = [episode.messages[-1][1] for episode in episodes]  # (role, content)
        return [{**rewards, "repeated": repeated(text)} for rewards, text in zip(own, last, strict=True)]


def repeated(text, words=3):
    """Return the share of the phrases of three words that stand in a text more than once."""
    parts = text.split()
    phrases = [tuple(parts[i : i + words]) for i in range(len(parts) - words + 1)]
    return 1 - len(set(phrases)) / len(phrases) if phrases else 0.0


@whet.hookimpl
def whet_environments():
    return [whet.Component("no-repeats", NoRepeatsConfig, ":NoRepeats")]
