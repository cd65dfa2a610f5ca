"""A plugin of one file whose algorithm trains a critic and asks a teacher, and whose environment asks a judge."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from whet import hookimpl
from whet.component import AlgorithmFacts, Component, EnvironmentFacts, RoleNeed, Spec
from whet.data.messages import Message
from whet.data.model_info import ModelInfo
from whet.data.records import Task
from whet.interfaces.environment import Scorer


@frozen
class CriticConfig:
    """Trains a critic on what a policy says, and nothing else."""


def critic_facts(config: CriticConfig, model: ModelInfo) -> AlgorithmFacts:
    """Ask for a critic and a teacher."""
    roles = {"critic": RoleNeed(frozenset({"values"}), trained=True), "teacher": RoleNeed(frozenset({"logprobs"}))}
    return AlgorithmFacts(inputs=frozenset({"rollouts"}), group_size=2, groups_per_step=4, roles=roles)


class Critic:
    """The loop."""

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def run(self, parts: Any) -> None:
        """Train the critic towards 1 everywhere; say how far the teacher is from the policy."""
        critic, teacher = parts.roles["critic"], parts.roles["teacher"]
        for step in parts.steps:
            batch = parts.rollouts.take(4)
            taught, own = (model.score(batch, ("logprobs",))["logprobs"] for model in (teacher, parts.backend))
            found = critic.train(batch, Spec("whet_testing.losses:Regression"))
            parts.sync_weights(version=step.number)
            step.log({"critic/loss": found["loss"]} | _gap(taught - own))
            step.finish(batch)


def _gap(gap: Any) -> dict[str, Any]:
    from whet.data.metrics import largest

    return {"teacher/gap": largest(float(np.abs(gap).max()))}


@frozen
class JudgedConfig:
    """Rewards are what a judge says of the answer."""


class Judged:
    """An environment of one question."""

    def __init__(self, config: JudgedConfig, roles: Mapping[str, Scorer]) -> None:
        self.judge = roles["judge"]
        self.reward_weights: Mapping[str, float] = {}

    def tasks(self, split: str) -> list[Task]:
        """Return a few tasks."""
        return [Task((Message("user", f"Say {n}."),), {}) for n in range(4)]

    async def run(self, task: Task, model: Any) -> dict[str, float]:
        """Ask, and have the answer judged."""
        reply = await model.reply(task.prompt)
        return {"judged": await self.judge.value([*task.prompt, Message("assistant", reply.text or " ")])}

    def close(self) -> None:
        """Nothing is held."""


def judged_facts(config: JudgedConfig, model: ModelInfo) -> EnvironmentFacts:
    """Ask for a judge."""
    return EnvironmentFacts(roles={"judge": RoleNeed(frozenset({"values"}))})


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer the algorithm."""
    yield Component("critic-alone", CriticConfig, f"{__name__}:Critic", f"{__name__}:critic_facts")


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment."""
    yield Component("judged", JudgedConfig, f"{__name__}:Judged", f"{__name__}:judged_facts")
