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
    """Find numbers of GRPO that cannot work."""
    grpo = config.algorithm.config
    if not isinstance(grpo, GrpoConfig):
        return
    for name in ("prompts_per_step", "minibatches"):
        if getattr(grpo, name) < 1:
            yield Problem(f"algorithm.{name}", f"is {getattr(grpo, name)}, wanted at least 1")
    if grpo.group_size < 2:
        yield Problem("algorithm.group_size", f"is {grpo.group_size}; answers are compared, so at least 2 are needed")
    sequences = grpo.prompts_per_step * grpo.group_size
    if grpo.minibatches > sequences >= 1:
        yield Problem("algorithm.minibatches", f"is {grpo.minibatches}, more than the {sequences} answers of a step")
    if isinstance(loss := grpo.loss.config, ClippedPgConfig):
        for name, limit in (("clip_low", 1.0), ("clip_high", float("inf"))):
            if not 0 <= getattr(loss, name) <= limit:
                wanted = "from 0 to 1" if limit == 1 else "at least 0"
                yield Problem(f"algorithm.loss.{name}", f"is {getattr(loss, name)}, wanted {wanted}")
