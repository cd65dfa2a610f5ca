"""What whet-grpo offers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_grpo import config as sections
from whet_grpo.config import GroupLossConfig, GrpoConfig
from whet_ops.algorithms.config import terms_of
from whet_ops.algorithms.problems import policy_loss_problems, policy_problems

if TYPE_CHECKING:
    from whet.config.sections import Config

OF_LOSSES = "whet_grpo.config:group_loss_facts"
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
    yield Component("gmpo", sections.GmpoConfig, "whet_grpo.losses:Gmpo", OF_LOSSES)
    yield Component("sapo", sections.SapoConfig, "whet_grpo.losses:Sapo", OF_LOSSES)
    yield Component("vespo", sections.VespoConfig, "whet_grpo.losses:Vespo", OF_LOSSES)
    yield Component("dppo", sections.DppoConfig, "whet_grpo.losses:Dppo", OF_LOSSES)
    yield Component("reinforce", sections.ReinforceConfig, "whet_grpo.losses:Reinforce", OF_LOSSES)


@hookimpl
def whet_advantages() -> Iterable[Component]:
    """Offer advantages from rewards and groups."""
    yield Component("group-mean", sections.GroupMeanConfig, "whet_grpo.advantages:GroupMean", OF_GROUPS)
    yield Component("rloo", sections.RlooConfig, "whet_grpo.advantages:Rloo", OF_GROUPS)
    yield Component("opo", sections.OpoConfig, "whet_grpo.advantages:Opo", OF_GROUPS)
    yield Component("pass-at-k", sections.PassAtKConfig, "whet_grpo.advantages:PassAtK", OF_GROUPS)
    yield Component("remax", sections.RemaxConfig, "whet_grpo.advantages:Remax", "whet_grpo.config:remax_facts")
    yield Component("gdpo", sections.GdpoConfig, "whet_grpo.advantages:Gdpo", OF_GROUPS)
    yield Component(
        "reinforce-plus-plus",
        sections.ReinforcePlusPlusConfig,
        "whet_grpo.advantages:ReinforcePlusPlus",
        "whet_grpo.config:reinforce_plus_plus_facts",
    )
    yield Component(
        "turn-returns", sections.TurnReturnsConfig, "whet_grpo.advantages:TurnReturns",
        "whet_grpo.config:turn_returns_facts",
    )  # fmt: skip
    yield Component(
        "role-baseline", sections.RoleBaselineConfig, "whet_grpo.advantages:RoleBaseline",
        "whet_grpo.config:role_baseline_facts",
    )  # fmt: skip


@hookimpl
def whet_filters() -> Iterable[Component]:
    """Offer the dynamic sampling of DAPO."""
    yield Component("unequal-rewards", sections.UnequalRewardsConfig, "whet_grpo.filters:UnequalRewards", OF_GROUPS)


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find numbers that do not go together."""
    if isinstance(config.algorithm.config, GrpoConfig):
        yield from policy_problems(config.algorithm.config, config)
        yield from _of_advantages(config.algorithm.config, config)
    for path, loss in terms_of(getattr(config.algorithm.config, "loss", None), "algorithm.loss"):
        if isinstance(loss.config, GroupLossConfig):
            yield from _of_loss(path, loss.config, config)


def _of_advantages(grpo: GrpoConfig, config: "Config") -> Iterable[Problem]:
    found = grpo.advantages.config
    if isinstance(found, sections.ReinforcePlusPlusConfig) and not found.per_token:
        for name in (name for name, is_set in (("gamma", found.gamma < 1), ("kl_of", found.kl_of == "own")) if is_set):
            yield Problem(
                f"algorithm.advantages.{name}", "has no effect without per_token: all tokens have one advantage"
            )
    if isinstance(found, sections.ReinforcePlusPlusConfig) and found.baseline_of == "reward" and not found.baseline:
        yield Problem("algorithm.advantages.baseline_of", "has no effect without a baseline; set baseline: true")
    if isinstance(found, sections.PassAtKConfig):
        size = min((entry.group_size or grpo.group_size for entry in config.environments), default=grpo.group_size)
        if found.baseline == "mean" and (found.k or size) >= size:
            words = f"all {size} samples of a group, whose advantages are 0 with baseline: mean; set k below {size}"
            yield Problem("algorithm.advantages.k", f"is {found.k or 'null'}: {words}")
        elif (found.k or size) > size:
            yield Problem("algorithm.advantages.k", f"is {found.k}, more than the {size} samples of a group")
    if isinstance(found, sections.GdpoConfig) and grpo.overlong.factor < 1:
        words = "would multiply the rewards, which `gdpo` has normalised one by one; use overlong.penalty"
        yield Problem("algorithm.overlong.factor", words)
    if isinstance(found, sections.GdpoConfig) and grpo.clip_reward:
        yield Problem("algorithm.clip_reward", "has no effect on `gdpo`, which reads the named rewards; remove it")
    if isinstance(found, sections.GdpoConfig) and found.scale == "none" and found.std_over == "others":
        yield Problem("algorithm.advantages.std_over", "has no effect with scale: none, which divides by nothing")


def _of_loss(path: str, loss: GroupLossConfig, config: "Config") -> Iterable[Problem]:
    yield from policy_loss_problems(path, loss, config.rollout)
    if loss.off_policy.since == "old" and loss.off_policy.threshold is None:
        yield Problem(f"{path}.off_policy.since", "has no effect without a threshold; set off_policy.threshold")
