"""The sections of GRPO and its parts, and what planning needs to know of them."""

from typing import Literal

from attrs import field, frozen, validators

from whet.component import Facts, Selection
from whet.config.sections import selection
from whet.model import ModelInfo


@frozen
class GrpoConfig:
    """Group relative policy optimisation: reward each answer relative to others of the same prompt."""

    prompts_per_step: int = field(default=32, validator=validators.ge(1))
    """Groups that one step consumes."""
    group_size: int = field(default=8, validator=validators.ge(2))
    """Answers to each prompt, compared with each other."""
    minibatches: int = field(default=1, validator=validators.ge(1))
    """Optimizer steps taken on each batch."""
    advantages: Selection = selection("advantages", "group-mean")
    """How rewards become advantages."""
    loss: Selection = selection("losses", "clipped-pg")
    """What is minimised."""
    filters: list[Selection] = field(
        factory=list, metadata={"kind": "filters", "default": None, "inline": False}, kw_only=True
    )
    """Which groups to leave out; each is replaced by another, so a step always has `prompts_per_step` groups."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = "auto"
    """Whose logprobs the policy's ratio is taken against. `trainer`: those of the weights before the step, at the
    cost of a forward pass where `minibatches` is above 1; with 1 the ratio is 1 by construction and nothing is
    computed. `sampler`: those recorded while sampling, which also corrects for stale weights, and for a generator
    that rounds differently. `auto`: `trainer` at `rollout.max_staleness` 0, else `sampler`."""


@frozen
class ClippedPgConfig:
    """The clipped policy gradient of PPO, per token."""

    clip_low: float = field(default=0.2, validator=[validators.ge(0), validators.le(1)])
    """A ratio below 1 minus this is no longer pushed down."""
    clip_high: float = field(default=0.2, validator=validators.ge(0))
    """A ratio above 1 plus this is no longer pushed up; above `clip_low` it is the clip-higher of DAPO."""
    aggregation: Literal["token", "sequence"] = "token"
    """`token`: the mean over all tokens of the batch. `sequence`: the mean over sequences of each one's mean, as in
    the paper of GRPO; tokens of short answers weigh more."""
    entropy: bool = False
    """Also report the policy's mean entropy, in nats."""


@frozen
class GroupMeanConfig:
    """Rewards centred in their group, and scaled."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group's rewards, of the whole batch's, or by nothing."""
    unbiased: bool = True
    """Standard deviation with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=validators.ge(0))
    """Added to the standard deviation."""
    leave_one_out: bool = False
    """Centre by the mean of the group's other rewards, as RLOO does."""


@frozen
class UnequalRewardsConfig:
    """Leaves out groups whose rewards are all equal: they teach nothing (the dynamic sampling of DAPO)."""


def grpo_facts(config: GrpoConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the algorithm."""
    return Facts(
        inputs=frozenset({"rollouts"}),
        columns_written=frozenset({"advantages", "old_logprobs"}),
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
    )


def clipped_pg_facts(config: ClippedPgConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the loss."""
    return Facts(
        outputs_needed=frozenset({"logprobs", "entropy"} if config.entropy else {"logprobs"}),
        columns_read=frozenset({"advantages", "sampler_logprobs"}),
    )
