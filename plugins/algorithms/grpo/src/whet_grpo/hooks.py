"""What whet-grpo offers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_grpo.config import ClippedPgConfig, GroupMeanConfig, GrpoConfig, UnequalRewardsConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer GRPO."""
    yield Component("grpo", GrpoConfig, "whet_grpo.grpo:Grpo", "whet_grpo.config:grpo_facts")


@hookimpl
def whet_losses() -> Iterable[Component]:
    """Offer the clipped policy gradient."""
    yield Component("clipped-pg", ClippedPgConfig, "whet_grpo.losses:ClippedPg", "whet_grpo.config:clipped_pg_facts")


@hookimpl
def whet_advantages() -> Iterable[Component]:
    """Offer rewards relative to their group."""
    yield Component("group-mean", GroupMeanConfig, "whet_grpo.advantages:GroupMean")


@hookimpl
def whet_filters() -> Iterable[Component]:
    """Offer the dynamic sampling of DAPO."""
    yield Component("unequal-rewards", UnequalRewardsConfig, "whet_grpo.filters:UnequalRewards")


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find numbers of GRPO that do not go together."""
    grpo = config.algorithm.config
    if isinstance(grpo, GrpoConfig) and grpo.minibatches > grpo.prompts_per_step * grpo.group_size:
        answers = f"the {grpo.prompts_per_step} x {grpo.group_size} answers of a step"
        yield Problem("algorithm.minibatches", f"is {grpo.minibatches}, more than {answers}")
