"""What whet-ppo offers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, LossFacts, Problem
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_ops.algorithms.config import terms_of
from whet_ops.algorithms.problems import average_problems, policy_loss_problems, policy_problems
from whet_ppo.config import CRITIC, PpoClipConfig, PpoConfig, ValueClipConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer PPO."""
    yield Component("ppo", PpoConfig, "whet_ppo.ppo:Ppo", "whet_ppo.config:ppo_facts")


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer a loss of the policy and one of the critic."""
    yield Component("ppo-clip", PpoClipConfig, "whet_ppo.losses:PpoClip", "whet_ppo.config:ppo_clip_facts")
    yield Component("value-clip", ValueClipConfig, "whet_ppo.losses:ValueClip", "whet_ppo.config:value_clip_facts")


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find what PPO cannot do without, and numbers that do not go together."""
    ppo = config.algorithm.config
    if isinstance(ppo, PpoConfig):
        yield from _of_critic(ppo, config)
        yield from policy_problems(ppo, config)
        yield from _of_numbers(ppo, config)
        value_loss = ppo.value_loss.config
        if isinstance(value_loss, ValueClipConfig):
            yield from average_problems("algorithm.value_loss", value_loss, config.rollout)
    for path, loss in terms_of(getattr(ppo, "loss", None), "algorithm.loss"):
        if isinstance(loss.config, PpoClipConfig):
            yield from policy_loss_problems(path, loss.config, config.rollout)


def _of_critic(ppo: PpoConfig, config: "Config") -> Iterable[Problem]:
    if CRITIC not in config.roles:
        example = "roles: {critic: {like: backend, head: value}}"
        yield Problem("roles", f"has no critic, which ppo trains beside the policy; add `{example}`")
    if facts_of(ppo.value_loss, ModelInfo(config.model.path, {}), LossFacts).role != CRITIC:
        words = "is no loss of a critic; choose one that reads its values, e.g. value-clip"
        yield Problem("algorithm.value_loss", words)


def _of_numbers(ppo: PpoConfig, config: "Config") -> Iterable[Problem]:
    if config.run.steps is not None and ppo.critic_warmup >= config.run.steps:
        words = f"is {ppo.critic_warmup} of {config.run.steps} steps, so the policy would never learn"
        yield Problem("algorithm.critic_warmup", f"{words}; lower it, or raise run.steps")
    if ppo.overlong.mask and ppo.gae.truncated == "bootstrap":
        words = "has no effect: algorithm.overlong.mask leaves out the responses that were cut"
        yield Problem("algorithm.gae.truncated", f"{words}; choose one of the two")
