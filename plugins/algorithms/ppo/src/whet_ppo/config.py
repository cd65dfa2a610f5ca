"""The sections of PPO and its losses, and what planning needs to know of them."""

from typing import Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, le

from whet.component import Facts, RoleNeed, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, STEPS, above, between
from whet.config.policy import (
    AverageConfig,
    CorrectionSection,
    KlLossSection,
    KlRewardSection,
    LikelihoodSection,
    OverlongSection,
    TopEntropySection,
)
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of

CRITIC = "critic"
"""The role of the model that gives values."""


@frozen
class GaeSection:
    """Generalised advantage estimation: how rewards and values become advantages and returns."""

    gamma: float = field(default=1.0, validator=[ge(0), le(1)])
    """Discount of a reward for each token that it comes later."""
    lambda_value: float = field(default=1.0, validator=[ge(0), le(1)])
    """Lambda of the returns that the critic learns. 1: the rewards that really came, however far they are from the
    token, whatever the critic thought; below, a part of them decays on the way."""
    lambda_policy: float = field(default=0.95, validator=[ge(0), le(1)])
    """Lambda of the advantages that the policy learns from: lower means less variance and more trust in the critic."""
    adaptive_alpha: float = field(default=0.0, validator=between(0, FACTOR))
    """Instead of `lambda_policy`: 1 - 1 / (this x tokens of the answer), at least 0, as in VAPO, which has 0.05. 0: the
    same lambda for all answers."""
    truncated: Literal["end", "bootstrap"] = "end"
    """What comes after an answer that was cut by its length. `end`: nothing, as after any other. `bootstrap`: what the
    critic expects there, beside the reward."""
    whiten: Literal["unbiased", "biased", "none"] = "unbiased"
    """Give the advantages of all trained tokens of a batch mean 0 and deviation 1. `unbiased`: variance with n - 1 in
    the denominator; `biased`: with n."""
    whiten_epsilon: float = field(default=1.0e-8, validator=above(0, 1))
    """What keeps small variances of advantages from blowing up; see `whiten_epsilon_at`."""
    whiten_epsilon_at: Literal["floor", "variance"] = "floor"
    """`floor`: it is the smallest variance. `variance`: it is added to the variance, as in verl, NeMo RL and TRL."""
    whiten_rewards: bool = False
    """First give the rewards of all trained tokens deviation 1, keeping their mean, as TRL can; variance and epsilon as
    of the advantages."""


@frozen
class PpoConfig:
    """Proximal policy optimisation: a critic says what to expect at each token, the policy learns from what differs."""

    prompts_per_step: int = field(default=32, validator=between(1, BATCH))
    """Groups that one step consumes."""
    group_size: int = field(default=1, validator=between(1, GROUP))
    """Answers to each prompt. PPO compares none of them; several share the computation of their prompt."""
    minibatches: int = field(default=4, validator=between(1, BATCH))
    """Optimizer steps taken in one pass over each batch."""
    epochs: int = field(default=1, validator=between(1, GROUP))
    """Passes of the policy over each batch."""
    critic_epochs: int = field(default=0, validator=between(0, GROUP))
    """Passes of the critic over each batch, before the policy's; 0: as many as the policy makes."""
    critic_warmup: int = field(default=0, validator=between(0, STEPS))
    """First steps of the run, on which the critic learns alone."""
    gae: GaeSection = Factory(GaeSection)
    """How rewards and values become advantages."""
    loss: Selection = selection("losses", "ppo-clip")
    """What the policy minimises."""
    value_loss: Selection = selection("losses", "value-clip")
    """What the critic minimises."""
    filters: list[Selection] = field(
        factory=list, metadata={"kind": "filters", "default": None, "inline": False}, kw_only=True
    )
    """Which groups to leave out; each is replaced by another, so a step always has `prompts_per_step` groups."""
    overlong: OverlongSection = Factory(OverlongSection)
    """What happens to answers that are too long."""
    kl_reward: KlRewardSection = Factory(KlRewardSection)
    """A penalty in the reward of each token for leaving the reference policy."""
    correction: CorrectionSection = Factory(CorrectionSection)
    """What happens where the trainer's logprobs differ from the sampler's."""
    top_entropy: TopEntropySection = Factory(TopEntropySection)
    """Whether only tokens of high entropy teach the policy; the critic learns from all."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = "auto"
    """Whose logprobs the policy's ratio is taken against. `trainer`: those of the weights before the step, at the
    cost of a forward pass where a batch gets several optimizer steps, or a `correction` that the training pass cannot
    make; else the ratio is 1 by construction and nothing is computed. `sampler`: those recorded while sampling, which
    also corrects for stale weights, and for a generator that rounds differently. `auto`: `trainer` at
    `rollout.max_staleness` 0 and with a `correction`, else `sampler`."""


@frozen
class PpoClipConfig(AverageConfig):
    """The clipped policy gradient of PPO, with a likelihood term on right answers and an entropy bonus where wanted."""

    clip_low: float = field(default=0.2, validator=[ge(0), le(1)])
    """A ratio below 1 minus this is no longer pushed down."""
    clip_high: float = field(default=0.2, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up; above `clip_low` it is the clip-higher of DAPO."""
    clip_dual: float = field(default=0.0, validator=between(0, FACTOR))
    """A bad token whose ratio is above this is no longer pushed down, either: dual clipping, usually 3; 0: off."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of the logarithm of a ratio, in nats, beyond which there is no gradient, as in verl; 0: none, as in TRL and
    NeMo RL."""
    kl: KlLossSection = Factory(KlLossSection)
    """A penalty for leaving the reference policy; the one in the reward is `algorithm.kl_reward`."""
    likelihood: LikelihoodSection = Factory(LikelihoodSection)
    """A likelihood term on right answers."""
    entropy_weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of a bonus for the policy's mean entropy; 0: none."""
    entropy: bool = False
    """Also report the policy's mean entropy, in nats; with a bonus it is in any case."""

    @property
    def wants_entropy(self) -> bool:
        """Whether the model's entropy is needed."""
        return self.entropy or self.entropy_weight > 0


@frozen
class ValueClipConfig(AverageConfig):
    """Half the squared error of the critic, which may move only so far from what it said before the step."""

    clip: float = field(default=0.2, validator=between(0, FACTOR))
    """Values count as at most this far from those before the step, where that makes the error larger, in units of the
    reward; 0: no clipping."""


def ppo_facts(config: PpoConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the algorithm."""
    written = {"advantages", "old_logprobs", "old_values", "returns", "token_rewards"}
    written |= {"reward:overlong"} if config.overlong.penalty else set()
    written |= {"reward:kl", "task_reward"} if config.kl_reward.weight else set()
    reference = wants_reference(config, model)
    return Facts(
        inputs=frozenset({"rollouts"}),
        columns_written=frozenset(written | ({"reference_logprobs"} if reference else set())),
        columns_essential=frozenset({"advantages"}),
        weights_needed=frozenset({"reference"} if reference else ()),
        outputs_needed=frozenset({"entropy"} if config.top_entropy.share < 1 else ()),
        roles={CRITIC: RoleNeed(frozenset({"values"}), trained=True)},
        token_advantages=True,
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
    )


def wants_reference(config: PpoConfig, model: ModelInfo) -> bool:
    """Say whether anything reads the logprobs of the reference policy."""
    return config.kl_reward.weight > 0 or "reference_logprobs" in facts_of(config.loss, model).columns_read


def ppo_clip_facts(config: PpoClipConfig, model: ModelInfo) -> Facts:
    """Return what planning needs to know of the policy's loss."""
    further = {"reward"} if config.likelihood.weight else set()
    further |= {"reference_logprobs"} if config.kl.weight else set()
    return Facts(
        outputs_needed=frozenset({"logprobs", "entropy"} if config.wants_entropy else {"logprobs"}),
        columns_read=frozenset({"advantages", "sampler_logprobs"} | further),
        token_advantages=True,
    )


def value_clip_facts(config: ValueClipConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the critic's loss."""
    return Facts(role=CRITIC, outputs_needed=frozenset({"values"}), columns_read=frozenset({"returns", "old_values"}))
