"""What whet-grpo offers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem, Selection
from whet.config.policy import shaping_problems
from whet_grpo import config as sections
from whet_grpo.config import GrpoConfig, PolicyLossConfig

if TYPE_CHECKING:
    from whet.config.sections import Config

OF_LOSSES = "whet_grpo.config:policy_loss_facts"
OF_GROUPS = "whet_grpo.config:group_facts"


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer GRPO."""
    yield Component("grpo", GrpoConfig, "whet_grpo.grpo:Grpo", "whet_grpo.config:grpo_facts")


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the losses of a policy."""
    yield Component("clipped-pg", sections.ClippedPgConfig, "whet_grpo.losses:ClippedPg", OF_LOSSES)
    yield Component("gspo", sections.GspoConfig, "whet_grpo.losses:Gspo", OF_LOSSES)
    yield Component("cispo", sections.CispoConfig, "whet_grpo.losses:Cispo", OF_LOSSES)
    yield Component("reinforce", sections.ReinforceConfig, "whet_grpo.losses:Reinforce", OF_LOSSES)


@hookimpl
def whet_advantages() -> Iterable[Component]:
    """Offer advantages from rewards and groups."""
    yield Component("group-mean", sections.GroupMeanConfig, "whet_grpo.advantages:GroupMean", OF_GROUPS)
    yield Component("rloo", sections.RlooConfig, "whet_grpo.advantages:Rloo", OF_GROUPS)
    yield Component("gdpo", sections.GdpoConfig, "whet_grpo.advantages:Gdpo", OF_GROUPS)
    yield Component(
        "reinforce-plus-plus",
        sections.ReinforcePlusPlusConfig,
        "whet_grpo.advantages:ReinforcePlusPlus",
        "whet_grpo.config:reinforce_plus_plus_facts",
    )


@hookimpl
def whet_filters() -> Iterable[Component]:
    """Offer the dynamic sampling of DAPO."""
    yield Component("unequal-rewards", sections.UnequalRewardsConfig, "whet_grpo.filters:UnequalRewards", OF_GROUPS)


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find numbers that do not go together."""
    if isinstance(config.algorithm.config, GrpoConfig):
        yield from _of_grpo(config.algorithm.config, config)
    loss = getattr(config.algorithm.config, "loss", None)
    if isinstance(loss, Selection) and isinstance(loss.config, PolicyLossConfig):
        yield from _of_loss(loss.config, config)


def _of_grpo(grpo: GrpoConfig, config: "Config") -> Iterable[Problem]:
    if grpo.minibatches > grpo.prompts_per_step * grpo.group_size:
        answers = f"the {grpo.prompts_per_step} x {grpo.group_size} answers of a step"
        yield Problem("algorithm.minibatches", f"is {grpo.minibatches}, more than {answers}")
    yield from shaping_problems(grpo.overlong, grpo.correction, config.rollout)
    yield from _of_advantages(grpo)
    if grpo.correction.wanted and grpo.old_logprobs == "sampler":
        yield Problem(
            "algorithm.correction",
            "compares the trainer's logprobs with the sampler's, and with algorithm.old_logprobs: sampler the trainer "
            "gives none; choose `auto` or `trainer`",
        )


def _of_advantages(grpo: GrpoConfig) -> Iterable[Problem]:
    found = grpo.advantages.config
    if isinstance(found, sections.ReinforcePlusPlusConfig) and not found.per_token:
        for name in (name for name, is_set in (("gamma", found.gamma < 1), ("kl_of", found.kl_of == "own")) if is_set):
            yield Problem(
                f"algorithm.advantages.{name}", "has no effect without per_token: all tokens have one advantage"
            )
    if isinstance(found, sections.GdpoConfig) and found.scale == "none" and found.deviation_of == "others":
        yield Problem("algorithm.advantages.deviation_of", "has no effect with scale: none, which divides by nothing")


def _of_loss(loss: PolicyLossConfig, config: "Config") -> Iterable[Problem]:
    if loss.aggregation == "constant" and not loss.max_length:
        say = f"e.g. to rollout.max_tokens, which is {config.rollout.max_tokens}"
        yield Problem("algorithm.loss.max_length", f"is 0, and the aggregation `constant` divides by it; set it, {say}")
    if loss.count_empty and loss.aggregation == "token":
        yield Problem("algorithm.loss.count_empty", "has no effect on the aggregation `token`, which counts tokens")
    dual, high = getattr(loss, "clip_dual", 0.0), getattr(loss, "clip_high", 0.0)
    if dual and dual <= 1 + high:
        yield Problem("algorithm.loss.clip_dual", f"is {dual:g}, wanted more than 1 + clip_high, or 0 for none")
    if loss.kl.straight_through and loss.kl.estimator == "k2":
        yield Problem("algorithm.loss.kl.straight_through", "changes nothing for k2, whose own gradient it takes")
