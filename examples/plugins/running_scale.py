"""Advantages with a memory: rewards on the scale of all rewards so far, each environment by itself."""

import math

import numpy as np
from attrs import field, frozen

import whet
from whet_ops.members import members_of


@frozen
class RunningScaleConfig:
    """Rewards minus their moving mean, over their moving deviation. Needs no group, so `group_size: 1` works."""

    keep: float = field(default=0.9, validator=whet.between(0, 1))
    """Share of the mean and of the deviation that a step keeps."""


class RunningScale:
    def __init__(self, config):
        self._keep, self._moments = config.keep, {}

    def __call__(self, batch):
        members = members_of(batch)
        rewards, env = batch["reward"][members.first].astype(np.float64), batch["env"][members.first]
        advantages = np.zeros(len(rewards), np.float32)
        for number in np.unique(env):
            mine, name = env == number, batch.info["environments"][number]
            new = np.array([rewards[mine].mean(), rewards[mine].var()])
            mean, variance = self._keep * np.array(self._moments.get(name, new)) + (1 - self._keep) * new
            self._moments[name] = [float(mean), float(variance)]
            advantages[mine] = (rewards[mine] - mean) / (math.sqrt(variance) + 1e-4)
        return advantages[members.owner]

    def state(self):
        return {"moments": self._moments}

    def load(self, state):
        self._moments = dict(state["moments"])


@whet.hookimpl
def whet_advantages():
    return [whet.Component("running-scale", RunningScaleConfig, ":RunningScale")]
