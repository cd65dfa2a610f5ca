"""The sections of GRPO and its parts, and what planning needs to know of them."""

from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import deep_mapping, ge, gt, le, optional

from whet.component import AdvantagesFacts, AlgorithmFacts, LossFacts, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, above, between
from whet.config.renamed import renamed
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_ops.algorithms.config import (
    ClipSection,
    PolicyConfig,
    PolicyLossConfig,
)

_MAX_WEIGHT: Any = optional(above(0, FACTOR))


@frozen
class GrpoConfig(PolicyConfig):
    """Group relative policy optimisation: reward each response relative to others of the same prompt."""

    group_size: int = field(default=8, validator=between(1, GROUP))
    """Responses to each prompt, compared with each other."""
    minibatches: int = field(default=1, validator=between(1, BATCH))
    """Optimizer steps taken in one pass over each batch."""
    advantages: Selection = selection("advantages", "group-mean")
    """How rewards become advantages."""
    clip_advantages: float = field(default=0.0, validator=between(0, FACTOR))
    """Advantages are clipped to plus or minus this; 0: not at all."""
    clip_advantages_below: float | None = field(default=None, validator=optional(between(0, FACTOR)))
    """Negative advantages are clipped to minus this instead; 0: not at all, null: as positive ones."""
    loss: Selection = selection("losses", "clipped-pg")
    """The loss to minimise."""


@frozen
class OffPolicySection:
    """Off-policy sequence masking: bad responses that the policy would hardly give any more teach nothing."""

    threshold: float | None = field(default=None, validator=optional(between(0, FACTOR)))
    """A response of negative advantage is left out where its tokens' logprobs have fallen by more nats than this on
    average since they were sampled; its tokens still count in the mean, and for `kl`. Null: none is left out."""
    since: Literal["sampler", "old"] = "sampler"
    """The logprobs that the fall is measured from: those of the generator, or the old logprobs of the ratio."""


@frozen
class GroupLossConfig(PolicyLossConfig):
    """The keys that all losses of this plugin share."""

    off_policy: OffPolicySection = Factory(OffPolicySection)
    """Whether bad responses that are far from the policy are left out."""


@frozen
class ClippedPgConfig(ClipSection, GroupLossConfig):
    """The clipped policy gradient of PPO, per token."""


@frozen
class GspoConfig(GroupLossConfig):
    """GSPO: the clipped policy gradient with one ratio for each sequence, the geometric mean of its tokens'."""

    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. The paper uses `sequence`."""
    level: Literal["sequence", "token"] = "sequence"
    """`token`: GSPO-token, which lets tokens of one sequence have different advantages."""
    ratio: Literal["mean", "product"] = "mean"
    """`mean`: the geometric mean of the tokens' ratios. `product`: their product, the ratio of whole sequences, as
    RLOO in TRL; it needs much wider bounds."""
    clip_low: float = field(default=3.0e-4, validator=[ge(0), le(1)])
    """A ratio below 1 minus this is no longer pushed down. Ratios of whole sequences stay much closer to 1."""
    clip_high: float = field(default=4.0e-4, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up."""


@frozen
class GmpoConfig(GroupLossConfig):
    """GMPO: the policy gradient with the geometric mean of a sequence's ratios, each of them clipped before."""

    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. The paper uses `sequence`."""
    clip_low: float = field(default=0.4, validator=between(0, FACTOR))
    """A token of a bad response whose log-ratio is below minus this, in nats, is no longer pushed down."""
    clip_high: float = field(default=0.4, validator=between(0, FACTOR))
    """A token of a good response whose log-ratio is above this, in nats, is no longer pushed up."""


@frozen
class SapoConfig(GroupLossConfig):
    """SAPO: a gradient that fades as a token's ratio leaves 1, in place of clipping."""

    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. The paper uses `sequence`."""
    temperature_positive: float = field(default=1.0, validator=above(0, FACTOR))
    """How fast the gradient fades for tokens of positive advantage. A higher value fades faster."""
    temperature_negative: float = field(default=1.05, validator=above(0, FACTOR))
    """The same for all other tokens."""


@frozen
class CispoConfig(GroupLossConfig):
    """CISPO: REINFORCE with a clipped importance weight, so that every token keeps a gradient."""

    clip_low: float = field(default=1.0, validator=[ge(0), le(1)])
    """The weight is at least 1 minus this; 1: no lower bound, as in the paper."""
    clip_high: float = field(default=4.0, validator=between(0, FACTOR))
    """The weight is at most 1 plus this."""


@frozen
class ReinforceConfig(GroupLossConfig):
    """REINFORCE, with truncated importance weights for samples of other weights."""

    max_weight: float | None = field(default=2.0, validator=_MAX_WEIGHT)
    """Largest importance weight; null: no weights, however old the samples are."""


@frozen
class GroupMeanConfig:
    """Rewards centred in their group, and scaled."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group's rewards, of the whole batch's, or by nothing."""
    unbiased: bool = True
    """Standard deviation with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the standard deviation."""
    leave_one_out: bool = False
    """Centre by the mean of the group's other rewards, as RLOO does."""
    std_over: Literal["group", "others"] = field(default="group", metadata=renamed("deviation_of"))
    """For the scale `group`: whether the deviation is taken over all rewards of the group, or over those of the other
    samples, as in NeMo RL."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""


@frozen
class RlooConfig:
    """REINFORCE leave-one-out: rewards less the mean of the others of the group."""

    whiten: bool = False
    """Also divide by the standard deviation over the batch."""
    unbiased: bool = True
    """Whether the deviation has n - 1 in its denominator rather than n."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the deviation."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""


@frozen
class ReinforcePlusPlusConfig:
    """REINFORCE++: rewards normalised over the whole batch."""

    baseline: bool = False
    """Subtract the mean of the group first: REINFORCE++ with baseline."""
    baseline_of: Literal["total", "reward"] = "total"
    """The rewards of that mean. `total`: with the penalty of `algorithm.kl_reward`, as in verl. `reward`: without it,
    as in OpenRLHF. With `kl_of: own`, as in NeMo RL, the penalty is never included."""
    per_token: bool = True
    """Whether the advantage of a token is the sum of the rewards from this token on, which differs from token to token
    with `algorithm.kl_reward`. If not, each token has the whole reward of its sequence."""
    kl_of: Literal["onwards", "own"] = "onwards"
    """The divergence of `algorithm.kl_reward` that a token pays for: its own and that of all later tokens, as in the
    paper, or its own alone, as in NeMo RL."""
    gamma: float = field(default=1.0, validator=[gt(0), le(1)])
    """Discount of a reward for each trained token that it comes later."""
    over: Literal["tokens", "sequences"] = "tokens"
    """Whether mean and deviation are taken over all trained tokens of the batch, or over its episodes."""
    unbiased: bool = False
    """Variance with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-8, validator=above(0, 1))
    """A small number that keeps the advantages finite where the variance is small; see `epsilon_at`."""
    epsilon_at: Literal["floor", "variance", "deviation"] = "floor"
    """`floor`: it is the smallest variance, as in OpenRLHF and NeMo RL. `variance`: it is added to the variance, as in
    verl. `deviation`: it is added to the deviation."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """With a baseline, what a sample counts for that is alone in its group: 0, or its reward as it is, as in verl."""


@frozen
class OpoConfig:
    """OPO: rewards less the mean of their group weighted by length, which is the baseline of least variance."""

    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""


@frozen
class RemaxConfig:
    """ReMax: rewards less the reward of the likeliest response, which is sampled beside each group at temperature 0."""

    per_token: bool = True
    """Whether the advantage of a token is the sum of the rewards from this token on, which differs from token to token
    with `algorithm.kl_reward`. If not, each token has the whole reward of its sequence."""


@frozen
class GdpoConfig:
    """GDPO: each named reward normalised in its group, then added up, then scaled over the batch."""

    weights: dict[str, float] = field(factory=dict, validator=deep_mapping(value_validator=between(-FACTOR, FACTOR)))
    """Weight of each named reward; a reward that is not named here does not count. Empty: all rewards have weight 1.
    The rewards of `overlong` and `kl_reward` are named `overlong` and `kl`."""
    scale: Literal["group", "none"] = "group"
    """Divide each reward by its deviation in the group, or by nothing."""
    unbiased: bool = True
    """Standard deviations with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the standard deviations."""
    leave_one_out: bool = False
    """Centre by the mean of the group's other rewards, as NeMo RL does."""
    std_over: Literal["group", "others"] = field(default="group", metadata=renamed("deviation_of"))
    """For the scale `group`: whether the deviation is taken over all rewards of the group, or over those of the other
    samples, as in NeMo RL."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""
    over: Literal["sequences", "tokens"] = "sequences"
    """Whether the deviation over the batch is taken over its episodes, or over all trained tokens, as in verl."""
    centre: bool = False
    """Also subtract the mean over the batch. It differs from 0 only if `over` is `tokens` or `std_over` is `others`."""
    batch_epsilon: float | None = field(default=None, validator=optional(between(0, 1)))
    """The number added to the deviation over the batch; null: `epsilon`."""
    epsilon_at: Literal["floor", "variance", "deviation"] = "deviation"
    """How `batch_epsilon` is used. `deviation`: it is added to the deviation, as in TRL. `variance`: it is added to the
    variance, as in verl. `floor`: it is the smallest variance."""


@frozen
class UnequalRewardsConfig:
    """Leaves out groups whose rewards are all equal: they teach nothing (the dynamic sampling of DAPO)."""

    reward: str = ""
    """Name of the reward to compare, e.g. the one for being right; empty: the weighted sum of all."""


def grpo_facts(config: GrpoConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the algorithm."""
    written = {"advantages", "old_logprobs"}
    if config.overlong.penalty:
        written |= {"reward:overlong"}
    if config.kl_reward.weight:
        written |= {"reward:kl", "token_rewards", "task_reward"}
    reference = wants_reference(config, model)
    return AlgorithmFacts(
        inputs=frozenset({"rollouts"}),
        columns_written=frozenset(written | ({"reference_logprobs"} if reference else set())),
        columns_essential=frozenset({"advantages"}),
        weights_needed=frozenset({"reference"} if reference else ()),
        outputs_needed=frozenset({"entropy"} if config.top_entropy.share < 1 else ()),
        token_advantages=config.correction.per_token or config.top_entropy.share < 1,
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
    )


def wants_reference(config: GrpoConfig, model: ModelInfo) -> bool:
    """Return whether anything reads the logprobs of the reference policy."""
    return config.kl_reward.weight > 0 or "reference_logprobs" in facts_of(config.loss, model, LossFacts).columns_read


def policy_loss_facts(config: GroupLossConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of a loss."""
    further = {"reference_logprobs"} if config.kl.weight else set()
    further |= {"reward"} if config.likelihood.weight else set()
    of_sequences = isinstance(config, GmpoConfig) or (isinstance(config, GspoConfig) and config.level == "sequence")
    return LossFacts(
        outputs_needed=frozenset({"logprobs", "entropy"} if config.entropy else {"logprobs"}),
        columns_read=frozenset({"advantages", "sampler_logprobs"} | further),
        token_advantages=not of_sequences,
    )


def group_facts(config: object, model: ModelInfo) -> AdvantagesFacts:
    """Return that an estimator or a filter compares samples of one task, unless it can treat a single one."""
    return AdvantagesFacts(least_group_size=1 if getattr(config, "singleton", "zero") == "reward" else 2)


def reinforce_plus_plus_facts(config: ReinforcePlusPlusConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return what planning needs to know of the estimator."""
    compares = config.baseline and config.singleton == "zero"
    return AdvantagesFacts(least_group_size=2 if compares else 1, token_advantages=config.per_token)


def remax_facts(config: RemaxConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return what planning needs to know of the estimator: one more response for each group, the likeliest."""
    return AdvantagesFacts(greedy_sample=True, token_advantages=config.per_token)
