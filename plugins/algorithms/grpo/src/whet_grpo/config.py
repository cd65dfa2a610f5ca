"""The config sections of GRPO and its parts, and the facts about them that planning reads."""

from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import deep_mapping, ge, gt, le, optional

from whet.component import AdvantagesFacts, AlgorithmFacts, LossFacts, Selection
from whet.config.bounds import FACTOR, GROUP, above, between
from whet.config.renamed import renamed
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet_ops.algorithms.config import (
    ClipSection,
    PolicyConfig,
    PolicyLossConfig,
    policy_facts,
    policy_loss_facts,
)

_MAX_WEIGHT: Any = optional(above(0, FACTOR))


@frozen
class GrpoConfig(PolicyConfig):
    """Group relative policy optimisation: compare the rewards of all responses to a prompt."""

    group_size: int = field(default=8, validator=between(1, GROUP))
    """Number of responses to each prompt. Their rewards are compared with each other."""
    advantages: Selection = selection("advantages", "group-mean")
    """How rewards become advantages."""
    clip_advantages: float = field(default=0.0, validator=between(0, FACTOR))
    """Advantages are clipped to plus or minus this; 0: no clipping."""
    clip_advantages_below: float | None = field(default=None, validator=optional(between(0, FACTOR)))
    """Negative advantages are clipped to minus this instead; 0: no clipping; null: the bound of positive advantages."""
    loss: Selection = selection("losses", "clipped-pg")
    """The loss to minimise."""


@frozen
class OffPolicySection:
    """Off-policy sequence masking: no training on bad responses that the policy would hardly produce any more."""

    threshold: float | None = field(default=None, validator=optional(between(0, FACTOR)))
    """Leave out a response of negative advantage if the logprobs of its tokens have fallen on average by more nats than
    this; see `since`. Its tokens still count in the mean, and for `kl`. Null: leave out no response."""
    since: Literal["sampler", "old"] = "sampler"
    """The logprobs before the fall. `sampler`: the generator's logprobs. `old`: the old logprobs of the ratio. They
    need several optimizer steps for each batch, or those of the sampler."""


@frozen
class GroupLossConfig(PolicyLossConfig):
    """The settings that all losses of this plugin share."""

    off_policy: OffPolicySection = Factory(OffPolicySection)
    """Whether to leave out bad responses that are far from the policy."""


@frozen
class ClippedPgConfig(ClipSection, GroupLossConfig):
    """The clipped policy gradient of PPO, per token."""


@frozen
class GspoConfig(ClipSection, GroupLossConfig):
    """GSPO: the clipped policy gradient with one ratio per sequence, the geometric mean of its tokens' ratios."""

    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. The paper uses `sequence`."""
    level: Literal["sequence", "token"] = "sequence"
    """`token`: GSPO-token, in which tokens of one sequence can have different advantages."""
    ratio: Literal["mean", "product"] = "mean"
    """`mean`: the geometric mean of the tokens' ratios. `product`: the product of the tokens' ratios, as RLOO in TRL.
    It is the ratio of the probabilities of whole sequences, and needs much wider bounds."""
    clip_low: float = field(default=3.0e-4, validator=[ge(0), le(1)])
    """A ratio below 1 minus this is no longer pushed down. A ratio of a sequence stays much closer to 1 than a ratio of
    a token."""
    clip_high: float = field(default=4.0e-4, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up."""


@frozen
class GmpoConfig(GroupLossConfig):
    """GMPO: the policy gradient with the geometric mean of a sequence's ratios, each clipped before the mean."""

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
    """How fast the gradient fades for all other tokens."""


@frozen
class VespoConfig(GroupLossConfig):
    """VESPO: REINFORCE with a smooth weight of the ratio of a whole sequence, in place of clipping.

    It is made for stale rollouts. With `old_logprobs: sampler`, the ratio also corrects for the gap between trainer and
    sampler, as in the paper, and no `correction` is needed.
    """

    power_positive: float = field(default=2.0, validator=between(0, FACTOR))
    """For sequences of advantage at least 0: how fast the weight falls as the ratio goes to 0."""
    decay_positive: float = field(default=3.0, validator=above(0, FACTOR))
    """For sequences of advantage at least 0: how fast the weight falls as the ratio grows."""
    power_negative: float = field(default=3.0, validator=between(0, FACTOR))
    """For all other sequences: how fast the weight falls as the ratio goes to 0."""
    decay_negative: float = field(default=2.0, validator=above(0, FACTOR))
    """For all other sequences: how fast the weight falls as the ratio grows."""


@frozen
class DppoConfig(GroupLossConfig):
    """DPPO: REINFORCE within a trust region that a divergence of probabilities bounds, in place of their ratio.

    A rare token may then change by a large factor, and a frequent one may not change by much. With
    `old_logprobs: sampler`, the trust region is around the policy that sampled, as in the paper.
    """

    divergence: Literal["tv", "kl"] = "tv"
    """The divergence of the policy from the old one, over the sampled token and all other tokens as one. `tv`: the
    total variation, which is the change of the token's probability. `kl`: KL(old || policy), in nats."""
    bound_low: float = field(default=0.15, validator=between(0, FACTOR))
    """A token of negative advantage that has become less likely, by a larger divergence than this, is no longer pushed
    down. The paper uses 0.15 for `tv` and 0.05 for `kl`."""
    bound_high: float = field(default=0.15, validator=between(0, FACTOR))
    """A token of positive advantage that has become likelier, by a larger divergence than this, is no longer pushed
    up."""
    max_weight: float | None = field(default=20.0, validator=_MAX_WEIGHT)
    """Largest importance weight; null: no bound."""


@frozen
class CispoConfig(GroupLossConfig):
    """CISPO: REINFORCE with a clipped importance weight, so that every token keeps a gradient."""

    clip_low: float = field(default=1.0, validator=[ge(0), le(1)])
    """The weight is at least 1 minus this; 1: no lower bound, as in the paper."""
    clip_high: float = field(default=4.0, validator=between(0, FACTOR))
    """The weight is at most 1 plus this."""


@frozen
class ReinforceConfig(GroupLossConfig):
    """REINFORCE, with truncated importance weights for samples of older model weights."""

    max_weight: float | None = field(default=2.0, validator=_MAX_WEIGHT)
    """Largest importance weight; null: no importance weights, even if the samples are stale."""


@frozen
class GroupMeanConfig:
    """The reward minus the mean of its group, then scaled."""

    scale: Literal["group", "batch", "none"] = "group"
    """`group`: divide by the standard deviation of the group's rewards. `batch`: by that of all rewards of the batch.
    `none`: no division."""
    unbiased: bool = True
    """Standard deviation with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the standard deviation."""
    leave_one_out: bool = False
    """Subtract the mean of the group's other rewards, as RLOO does."""
    std_over: Literal["group", "others"] = field(default="group", metadata=renamed("deviation_of"))
    """The rewards that the deviation of the scale `group` is computed from. `group`: all rewards of the group.
    `others`: the rewards of the group's other samples, as in NeMo RL."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""
    rescale: Literal["none", "unequal", "nonzero"] = "none"
    """Multiply the advantages by the number of samples of the batch over the number of some of them, because the others
    count in the mean of the loss but have no gradient. `unequal`: samples of groups whose rewards differ without the
    penalty of `kl_reward`, as in GPG. `nonzero`: samples of a reward other than 0, as in verl's `gpg`."""


@frozen
class RlooConfig:
    """REINFORCE leave-one-out: the reward minus the mean of the group's other rewards."""

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
    """The rewards in the baseline. `total`: with the penalty of `algorithm.kl_reward`, as in verl. `reward`: without
    this penalty, as in OpenRLHF. With `kl_of: own`, as in NeMo RL, the penalty is never in the baseline."""
    per_token: bool = True
    """Whether the advantage of a token is the sum of the rewards from this token on. With `algorithm.kl_reward`, this
    sum differs from token to token. If false, each token has the whole reward of its sequence."""
    kl_of: Literal["onwards", "own"] = "onwards"
    """The part of the penalty `algorithm.kl_reward` that counts for a token. `onwards`: the penalty of this token and
    of all later tokens, as in the paper. `own`: the penalty of this token only, as in NeMo RL."""
    gamma: float = field(default=1.0, validator=[gt(0), le(1)])
    """Discount factor of later rewards, per trained token."""
    over: Literal["tokens", "sequences"] = "tokens"
    """`tokens`: mean and deviation are over all trained tokens of the batch. `sequences`: over its episodes."""
    unbiased: bool = False
    """Variance with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-8, validator=above(0, 1))
    """A small number that keeps the advantages finite where the variance is small; see `epsilon_at`."""
    epsilon_at: Literal["floor", "variance", "deviation"] = "floor"
    """`floor`: `epsilon` is the smallest variance, as in OpenRLHF and NeMo RL. `variance`: `epsilon` is added to the
    variance, as in verl. `deviation`: `epsilon` is added to the deviation."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """With a baseline: the value of a sample that is alone in its group. `zero`: 0. `reward`: its reward, as in
    verl."""


@frozen
class OpoConfig:
    """OPO: the reward minus the length-weighted mean of its group, which is the baseline of least variance."""

    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""


@frozen
class PassAtKConfig:
    """Pass@k training: what a sample adds to the best reward of k samples, so that samples of a task stay diverse."""

    k: int | None = field(default=None, validator=optional(between(2, GROUP)))
    """Number of samples of which the best counts; null: all samples of the group."""
    baseline: Literal["leave-one-out", "mean"] = "leave-one-out"
    """What is subtracted from the best reward of the samples with this one. `leave-one-out`: the best reward of the
    others of these samples. With null for `k`, this is verl's `grpo_passk`. `mean`: the mean of the best reward over
    all choices of k samples. It needs a `k` below the group's size."""
    scale: Literal["group", "none"] = "group"
    """`group`: divide by a standard deviation. With `leave-one-out` it is that of the group's rewards, with `mean` that
    of the best reward over all choices of k samples. `none`: no division."""
    epsilon: float = field(default=1.0e-6, validator=between(0, 1))
    """Added to the standard deviation."""


@frozen
class RemaxConfig:
    """ReMax: the reward minus the reward of the likeliest response, sampled for each group at temperature 0."""

    per_token: bool = True
    """Whether the advantage of a token is the sum of the rewards from this token on. With `algorithm.kl_reward`, this
    sum differs from token to token. If false, each token has the whole reward of its sequence."""


@frozen
class GdpoConfig:
    """GDPO: each named reward is normalised in its group; the sum of the results is scaled over the batch."""

    weights: dict[str, float] = field(factory=dict, validator=deep_mapping(value_validator=between(-FACTOR, FACTOR)))
    """Weight of each named reward; a reward that is not named here does not count. Empty: the weights of the
    environment. The penalties of `algorithm.overlong` and `algorithm.kl_reward` are added to the sum without
    normalisation. Where `weights` names them, as `overlong` and `kl`, they are normalised like rewards; 0 leaves them
    out."""
    scale: Literal["group", "none"] = "group"
    """`group`: divide each reward by its deviation in the group. `none`: no division."""
    unbiased: bool = True
    """Standard deviations with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the standard deviations."""
    leave_one_out: bool = False
    """Subtract the mean of the group's other rewards, as NeMo RL does."""
    std_over: Literal["group", "others"] = field(default="group", metadata=renamed("deviation_of"))
    """The rewards that the deviation of the scale `group` is computed from. `group`: all rewards of the group.
    `others`: the rewards of the group's other samples, as in NeMo RL."""
    singleton: Literal["zero", "reward"] = field(default="zero", metadata=renamed("alone"))
    """The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""
    over: Literal["sequences", "tokens"] = "sequences"
    """`sequences`: the deviation over the batch is over its episodes. `tokens`: over all trained tokens, as in verl."""
    centre: bool = False
    """Also subtract the mean over the batch. This mean is 0 unless `over` is `tokens` or `std_over` is `others`."""
    batch_epsilon: float | None = field(default=None, validator=optional(between(0, 1)))
    """The number added to the deviation over the batch; null: `epsilon`."""
    epsilon_at: Literal["floor", "variance", "deviation"] = "deviation"
    """How `batch_epsilon` is used. `deviation`: added to the deviation, as in TRL. `variance`: added to the variance,
    as in verl. `floor`: the smallest variance."""


@frozen
class UnequalRewardsConfig:
    """Leaves out groups whose rewards are all equal: their advantages are all 0 (the dynamic sampling of DAPO)."""

    reward: str = ""
    """Name of the reward to compare, e.g. the reward for a correct answer; empty: the weighted sum of all rewards. The
    sum can be equal where `gdpo` still sees unequal rewards."""


def grpo_facts(config: GrpoConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return the facts about the algorithm that planning reads."""
    per_token = config.correction.per_token or config.top_entropy.share < 1
    return policy_facts(
        config, config.loss, config.group_size, token_advantages=per_token,
        optimizer_steps=lambda steps: {"backend": steps * config.epochs * config.minibatches},
    )  # fmt: skip


def group_loss_facts(config: GroupLossConfig, model: ModelInfo) -> LossFacts:
    """Return the facts about a loss that planning reads."""
    of_sequences = isinstance(config, (GmpoConfig, VespoConfig))
    of_sequences = of_sequences or (isinstance(config, GspoConfig) and config.level == "sequence")
    return policy_loss_facts(config, token_advantages=not of_sequences)


@frozen
class TurnReturnsConfig:
    """The discounted return of each turn, compared with the same turn of the group's other samples."""

    gamma: float = field(default=1.0, validator=[ge(0), le(1)])
    """Discount of a reward for each turn that it comes later."""
    baseline: Literal["leave-one-out", "group-mean", "none"] = "leave-one-out"
    """What is subtracted from a return: the mean over the group's other sequences that have this turn, the mean over
    all of them, or nothing."""
    scale: Literal["none", "group"] = "none"
    """`group`: divide by the standard deviation of the returns of this turn in the group. `none`: no division."""
    unbiased: bool = True
    """Standard deviation with n - 1 rather than n in the denominator."""
    epsilon: float = field(default=1.0e-4, validator=between(0, 1))
    """Added to the standard deviation."""
    singleton: Literal["zero", "reward"] = "zero"
    """The advantage of a turn that no other sequence of the group has: 0, or its return."""


@frozen
class RoleBaselineConfig:
    """The reward minus a moving average for each environment and agent: role-conditioned advantages of SPIRAL."""

    decay: float = field(default=0.95, validator=[ge(0), le(1)])
    """Share of the old average that remains after each sample."""
    gamma: float = field(default=1.0, validator=[ge(0), le(1)])
    """Discount of the advantage of a turn for each later turn of its sequence."""


def group_facts(config: object, model: ModelInfo) -> AdvantagesFacts:
    """Return the smallest group of an estimator or a filter: 1 if it accepts a single sample of a task, else 2."""
    return AdvantagesFacts(least_group_size=1 if getattr(config, "singleton", "zero") == "reward" else 2)


def reinforce_plus_plus_facts(config: ReinforcePlusPlusConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return the facts about the estimator that planning reads."""
    compares = config.baseline and config.singleton == "zero"
    return AdvantagesFacts(least_group_size=2 if compares else 1, token_advantages=config.per_token)


def remax_facts(config: RemaxConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return the facts about the estimator: it needs one more response for each group, the likeliest one."""
    return AdvantagesFacts(greedy_sample=True, token_advantages=config.per_token)


def turn_returns_facts(config: TurnReturnsConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return the facts about the estimator: each turn has an advantage of its own."""
    alone = config.baseline == "none" or config.singleton == "reward"
    return AdvantagesFacts(least_group_size=1 if alone else 2, token_advantages=True)


def role_baseline_facts(config: RoleBaselineConfig, model: ModelInfo) -> AdvantagesFacts:
    """Return the facts about the estimator: with a discount, each turn has an advantage of its own."""
    return AdvantagesFacts(token_advantages=config.gamma < 1)
