"""Config sections for the steps between rewards and loss, shared by algorithms that train on rollouts.

Needs no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, ge, gt, le, optional

from whet.component import AlgorithmFacts, LossFacts, RoleNeed, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, RECORDS, TOKENS, above, between
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of

OldLogprobs = Literal["current", "score", "sampler"]


def _ordered(instance: object, attribute: object, value: tuple[float, float] | None) -> None:
    if value is not None and not value[0] < value[1]:
        raise ValueError(f"is {list(value)}, wanted the lower bound, then the upper one")


_CLIP: Any = optional(deep_iterable(between(-FACTOR, FACTOR)))


@frozen
class OverlongSection:
    """The treatment of responses that are too long."""

    mask: bool = False
    """Leave truncated sequences out of the loss (DAPO's overlong filtering), and out of the penalty `kl_reward`. Their
    reward still counts in the baseline of their group."""
    penalty: float = field(default=0.0, validator=between(0, FACTOR))
    """Largest penalty for a long response, subtracted from its reward (DAPO's soft overlong punishment); 0: no
    penalty."""
    buffer: int = field(default=0, validator=between(0, TOKENS))
    """Number of tokens below `length` over which the penalty rises from 0 to its largest value. With 0, the whole
    penalty is for responses longer than `length`, which must then be given."""
    length: int = field(default=0, validator=between(0, TOKENS))
    """Longest response: the number of tokens that the model produces in all turns of an episode; 0:
    `rollout.max_tokens`, so give it where episodes have several turns."""
    bounded: bool = True
    """Whether the penalty stays at its largest value beyond `length`, as in DAPO's paper and TRL. If false, the
    penalty keeps rising, as in verl and NeMo RL."""
    factor: float = field(default=1.0, validator=between(0, 1))
    """The reward of a truncated response is multiplied by this, before `penalty` is subtracted; 1: it stays, 0: it
    is 0. A reward below 0 comes closer to 0 too. NeMo RL's `stop_properly_penalty_coef`."""

    @property
    def shapes(self) -> bool:
        """Return whether the reward of any response may change."""
        return self.penalty > 0 or self.factor < 1


@frozen
class AverageConfig:
    """The reduction of the losses of all tokens to one number."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """`token`: the mean over all tokens of the batch. `sequence`: the mean of each sequence, then the mean over
    sequences, as in the paper of GRPO; tokens of short responses weigh more. `constant`: the sum over tokens, divided
    by `max_length` times the number of sequences, as in Dr. GRPO."""
    max_length: int = field(default=0, validator=between(0, TOKENS))
    """For the aggregation `constant`: the number of tokens that each sequence counts as, e.g. `rollout.max_tokens`.
    With 1, the loss is the sum of each sequence, then the mean over sequences."""
    count_empty: bool = False
    """For the aggregations `sequence` and `constant`: whether empty sequences count, in which the model produced no
    token. They count in TRL, in NeMo RL and, over a whole optimizer step, in verl."""
    count_masked: bool | None = None
    """Whether a sequence counts if `overlong.mask` or a `correction` masks all its tokens: true in TRL and verl, false
    in NeMo RL. Null: the value of `count_empty`."""


@frozen
class KlControlSection:
    """A weight that changes so that the divergence stays near a target: the adaptive controller of Ziegler et al."""

    target: float = field(default=0.0, validator=between(0, FACTOR))
    """The target for the divergence from the reference, in nats; 0: the weight stays constant."""
    horizon: float = field(default=10_000.0, validator=above(0, RECORDS))
    """Number of episodes after which the weight has changed by the whole relative error. The relative error counts as
    at most 0.2. A step must have fewer than 5 * `horizon` episodes."""
    per: Literal["sequence", "token"] = "sequence"
    """The unit of the divergence. `sequence`: the sum over the tokens of an episode, as in the paper. `token`: the mean
    over the tokens of each sequence, then over sequences, as in verl. Those that `overlong.mask` leaves out do not
    count."""


@frozen
class KlRewardSection:
    """A penalty in the reward, per token, for the distance to the reference policy."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """The penalty for one nat; 0: no penalty, and no reference policy is needed. With `adaptive`: the weight of the
    first step."""
    adaptive: KlControlSection = Factory(KlControlSection)
    """How the weight adapts to the divergence. By default, the weight is constant."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """The estimator of the divergence from one token. In the reward, only k1 has the right gradient."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of log policy - log reference, in nats; 0: no bound."""
    clamp: float = field(default=10.0, validator=between(0, FACTOR))
    """Bound of the estimate, in nats; 0: no bound."""


@frozen
class KlLossSection:
    """A penalty in the loss for the distance to the reference policy. It is a separate term, averaged like the loss."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of one nat per token; 0: no penalty, and no reference policy is needed."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """The estimator of the divergence from one token."""
    importance: Literal["none", "score", "ratio", "sampler", "sequence"] = "none"
    """The weight that multiplies an estimate by k1 or k3. The weight has a gradient. `none`: no weight. `score`: the
    value is 1, and the gradient is that of the logprob; the penalty then has the right gradient on policy. `ratio`: new
    probability over old probability; the gradient is right off policy too. `sampler`: new probability over the
    generator's probability, whatever the old logprobs are, as in NeMo RL's on-policy approximation. `sequence`: the
    geometric mean of the sequence's ratios, as TRL does with ratios of sequences."""
    straight_through: bool = False
    """Use the gradient of k2 with the value of any estimator, as verl's `k3+`. This gradient is right on policy."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of log policy - log reference, in nats, beyond which a token gets no gradient; 0: no bound."""
    clamp: float = field(default=10.0, validator=between(0, FACTOR))
    """Bound of the estimate, in nats, beyond which a token gets no gradient; 0: no bound."""


@frozen
class KlOldSection:
    """A penalty in the loss for the distance to the policy that sampled, also on tokens without an advantage.

    k2 with the weight w is w/2 (log policy - log old)^2, as in Kimi K2.5 (arXiv:2602.02276), prime-rl's `kl_tau` = w/2
    and verl's `dro` with `dro_beta` = w. It is a separate term, averaged like the loss.
    """

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of one nat per token; 0: no penalty."""
    estimator: Literal["k2", "k3"] = "k2"
    """The estimator of the divergence from one token: of KL(old || policy)."""
    to: Literal["sampler", "old"] = "sampler"
    """`sampler`: the generator's logprobs. `old`: the trainer's before the step, where the algorithm has them."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of the log-ratio, in nats, beyond which a token gets no gradient; 0: no bound."""


@frozen
class LikelihoodSection:
    """A second loss term: the negative log-likelihood of correct responses, as in VAPO."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the mean over the tokens of correct responses; 0: no likelihood term. VAPO uses 0.1."""
    at_least: float = field(default=1.0, validator=le(FACTOR), metadata={"infinite": True})
    """The smallest reward of a correct response. The reward includes the penalty of `overlong`, but not the penalty of
    `kl_reward`. `-.inf`: all responses."""


@frozen
class TopEntropySection:
    """Training only on the tokens of the highest entropy, where the policy was least certain."""

    share: float = field(default=1.0, validator=above(0, 1))
    """Share of a step's trained tokens to keep; 1: all tokens. The paper uses 0.2. Below 1, the trainer scores the
    entropy of each batch before the training pass."""
    count_rest: bool = True
    """Whether the other tokens still count in the loss's mean, as in the paper and TRL. If false, they are not in the
    loss at all, nor in its penalties."""


@frozen
class CovarianceSection:
    """The treatment of the tokens that lower the policy's entropy most: those of large covariance.

    The covariance of a token is (advantage - mean) * (logprob - mean), over the trained tokens of a step's batch. It is
    that of the old logprobs: of the policy before the step, or of the sampler. They cost a forward pass where no other
    setting needs them, unless they are the sampler's.
    """

    method: Literal["none", "clip-cov", "kl-cov"] = "none"
    """`clip-cov`: tokens drawn at random from those with a covariance between `low` and `high` have no policy gradient.
    `kl-cov`: the tokens of the largest covariance have a penalty for their distance to the old policy."""
    share: float = field(default=2.0e-4, validator=above(0, 1))
    """Share of a step's trained tokens to treat, at least one token. The paper uses 2.0e-4, and 2.0e-3 for `kl-cov`
    with a model of 7B parameters."""
    low: float = field(default=1.0, validator=between(0, FACTOR))
    """For `clip-cov`: the covariance that a token must exceed."""
    high: float = field(default=5.0, validator=above(0, FACTOR))
    """For `clip-cov`: the covariance that a token must stay below."""
    weight: float = field(default=1.0, validator=above(0, FACTOR))
    """For `kl-cov`: the penalty for one nat of KL(old || policy), estimated by k3."""


@frozen
class CorrectionSection:
    """The correction of the difference between the trainer's and the sampler's logprobs.

    The training pass itself computes the correction if a batch gets one optimizer step, every token stays in the mean,
    and weights are not normalised. Otherwise the trainer scores each batch before the training pass.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    """Multiply the loss by a truncated weight: the trainer's probability over the sampler's probability, of each
    `token` or of the whole `sequence`."""
    cap: float = field(default=2.0, validator=gt(0), metadata={"infinite": True})
    """Largest weight; `.inf`: no bound."""
    floor: float = field(default=0.0, validator=between(0, FACTOR))
    """Smallest weight."""
    normalise: bool = False
    """Divide the weights by their mean over the batch, so that the mean is 1. verl has this option. With
    `count_masked`, a token that `mask` removes counts as a weight of 0 in this mean."""
    mask: Literal["none", "token", "sequence", "product", "worst"] = "none"
    """Remove tokens or sequences whose ratio is outside `low` to `high`. `token`: each token by its ratio (IcePop).
    `sequence`: each sequence by the geometric mean of its tokens' ratios. `product`: each sequence by the product of
    the ratios. `worst`: each sequence in which any ratio is outside."""
    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """The number that `mask` compares: a ratio, or an estimate of the divergence in nats. An estimate must be at most
    `high`. For the mask `token` it is the estimate of a token, for `sequence` the mean over the tokens, for `product`
    the sum, for `worst` the largest."""
    low: float = field(default=0.5, validator=between(0, FACTOR))
    """Smallest ratio that `mask` keeps."""
    high: float = field(default=5.0, validator=above(0, FACTOR))
    """Largest ratio, or divergence, that `mask` keeps."""
    count_masked: bool = True
    """Whether tokens that `mask` removes still count in the loss's mean, as in TRL and NeMo RL. They do not in verl."""
    max_token_gap: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence with a token whose logprobs differ by more nats than this; 0: no bound."""
    max_mean_gap: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence whose tokens' logprobs differ by more nats than this on average; 0: no bound."""
    max_mean_error: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence whose tokens' probabilities differ by a larger factor than this on average, as in NeMo RL; 0: no
    bound."""

    @property
    def wanted(self) -> bool:
        """Return whether any correction is configured."""
        return self.weights != "none" or self.mask != "none" or self.guards

    @property
    def drops(self) -> bool:
        """Return whether tokens may leave the loss's mean."""
        return self.guards or (self.mask != "none" and not self.count_masked)

    @property
    def whole(self) -> bool:
        """Return whether the correction needs the whole batch.

        It does if tokens may leave the mean, or if weights are normalised.
        """
        return self.drops or self.normalise

    @property
    def guards(self) -> bool:
        """Return whether sequences may be dropped."""
        return bool(self.max_token_gap or self.max_mean_gap or self.max_mean_error)

    @property
    def per_token(self) -> bool:
        """Return whether tokens of one sequence may get different weights."""
        return self.weights == "token" or (self.mask == "token" and self.count_masked)


@frozen
class PolicyLossConfig(AverageConfig):
    """The settings that all losses of a policy share."""

    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of the log-ratio of a token or of a sequence, in nats, as in verl. Beyond the bound there is no gradient.
    0: no bound, as in TRL and NeMo RL."""
    kl: KlLossSection = Factory(KlLossSection)
    """A penalty for the distance to the reference policy. `algorithm.kl_reward` is the penalty in the reward."""
    kl_old: KlOldSection = Factory(KlOldSection)
    """A penalty for the distance to the policy that sampled."""
    likelihood: LikelihoodSection = Factory(LikelihoodSection)
    """A likelihood term on right responses."""
    entropy: bool = False
    """Also report the policy's mean entropy, in nats."""
    entropy_weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of a bonus for the policy's mean entropy, which is then reported in any case; 0: none."""
    entropy_mean: Literal["loss", "token"] = "loss"
    """The mean of the bonus. `loss`: by `aggregation`, as in verl; with `constant` it is divided by `max_length`, too.
    `token`: over all trained tokens, as in TRL without `top_entropy_quantile`; with it, TRL counts the chosen alone."""

    metrics: Literal["live", "all"] = "live"
    """The tokens of the loss's metrics, `entropy` and `logprob_gap` among them. `live`: of sequences that can have a
    gradient; the others are not computed. `all`: all trained tokens, as in TRL and verl, also those of groups whose
    rewards are equal; a step with many such groups then takes longer."""

    @property
    def reads_entropy(self) -> bool:
        """Return whether the loss reads the model's entropy."""
        return self.entropy or self.entropy_weight > 0


@frozen(slots=False)  # a second base class beside one with slots
class ClipSection:
    """The clipping of the ratio of each token."""

    clip_low: float = field(default=0.2, validator=[ge(0), le(1)])
    """A ratio below 1 minus this is no longer pushed down."""
    clip_high: float = field(default=0.2, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up. A value above `clip_low` is the clip-higher of DAPO."""
    clip_dual: float = field(default=0.0, validator=between(0, FACTOR))
    """A token of negative advantage is no longer pushed down if its ratio is above this: dual clipping, usually 3; 0:
    off."""


@frozen(slots=False)  # a second base class beside one with slots
class MinibatchConfig:
    """The optimizer steps on one batch of rollouts."""

    minibatches: int = field(default=1, validator=between(1, BATCH), kw_only=True)
    """Optimizer steps taken in one pass over each batch."""
    count_over: Literal["minibatch", "batch"] = field(default="minibatch", kw_only=True)
    """The tokens or sequences that the loss of a minibatch is divided by. `minibatch`: its own, as in verl and NeMo RL.
    `batch`: the mean number of a minibatch over the whole batch, as in TRL's `dapo`, `cispo` and `vespo`. A token then
    weighs the same in every minibatch, so minibatches of long responses weigh more."""


@frozen
class PolicyConfig(MinibatchConfig):
    """The settings that all policy gradient algorithms share."""

    prompts_per_step: int = field(default=32, validator=between(1, BATCH))
    """Number of groups in one step."""
    epochs: int = field(default=1, validator=between(1, GROUP))
    """Passes of the policy over each batch."""
    filters: list[Selection] = field(
        factory=list, metadata={"kind": "filters", "default": None, "inline": False}, kw_only=True
    )
    """Filters that leave groups out. Another group replaces each, so a step always has `prompts_per_step` groups."""
    overlong: OverlongSection = Factory(OverlongSection)
    """The treatment of responses that are too long."""
    clip_reward: tuple[float, float] | None = field(default=None, validator=[_ordered, _CLIP])
    """Bounds of the reward of an episode, e.g. `[-10, 10]`, after the penalty of `overlong` and before that of
    `kl_reward`; null: none. Metrics, named rewards and filters have the rewards without bounds."""
    kl_reward: KlRewardSection = Factory(KlRewardSection)
    """A penalty in the reward of each token for the distance to the reference policy. `loss.kl` is the penalty in the
    loss."""
    correction: CorrectionSection = Factory(CorrectionSection)
    """The correction of the difference between the trainer's and the sampler's logprobs."""
    top_entropy: TopEntropySection = Factory(TopEntropySection)
    """Whether to train the policy only on tokens of high entropy. A critic trains on all tokens."""
    covariance: CovarianceSection = Factory(CovarianceSection)
    """How to treat the tokens that lower the policy's entropy most."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = "auto"
    """The logprobs in the denominator of the policy's ratio. `trainer`: the logprobs of the weights before the step.
    They cost a forward pass if a batch gets several optimizer steps, a `correction` that the training pass cannot
    compute, a `covariance`, or a loss whose facts name the column `old_logprobs`. Otherwise the ratio is 1 by
    construction and nothing is computed. `sampler`: the logprobs recorded while sampling. The ratio then also corrects
    for stale weights, and for a generator that rounds differently. `auto`: `trainer` at `rollout.max_staleness` 0 and
    with a `correction`, else `sampler`."""


def terms_of(loss: object, path: str = "") -> Iterator[tuple[str, Selection]]:
    """Yield each loss with its path: the loss itself, or the terms of a sum, also of a sum within.

    A loss is a sum if its config has a list of `terms`, each with the `component` of a loss.
    """
    if not isinstance(loss, Selection):
        return
    terms = getattr(loss.config, "terms", None)
    if not isinstance(terms, list):
        yield path, loss
        return
    for number, term in enumerate(terms):
        yield from terms_of(getattr(term, "component", None), f"{path}.terms.{number}")


def reads(loss: Selection, column: str) -> bool:
    """Return whether the facts of a loss name a batch column. The columns of a loss do not depend on the model."""
    return column in facts_of(loss, ModelInfo(""), LossFacts).columns_read


def reads_old_logprobs(config: PolicyConfig, loss: Selection) -> bool:
    """Return whether an algorithm or its loss reads the column `old_logprobs`, also where a ratio is 1 without it."""
    return config.covariance.method != "none" or reads(loss, "old_logprobs")


def choose_old_logprobs(
    wanted: Literal["auto", "trainer", "sampler"], scored: bool, corrected: bool, max_staleness: int
) -> OldLogprobs:
    """Return the source of the old policy's logprobs.

    `current`: the loss uses its own logprobs without gradient, so the ratio is exactly 1. `score`: a forward pass of
    the trainer before the first minibatch. It is needed if a batch gets several optimizer steps or an earlier
    correction, or if the loss reads the column (`scored`). `sampler`: the logprobs recorded while sampling. `auto`
    chooses the trainer's logprobs at staleness 0, and with a correction, which compares them with the sampler's
    (`corrected`).
    """
    if wanted == "sampler" or (wanted == "auto" and max_staleness > 0 and not corrected):
        return "sampler"
    return "score" if scored else "current"


def wants_reference(config: PolicyConfig, loss: Selection) -> bool:
    """Return whether an algorithm or its loss reads the logprobs of the reference policy."""
    return config.kl_reward.weight > 0 or reads(loss, "reference_logprobs")


def policy_facts(
    config: PolicyConfig, loss: Selection, group_size: int, *, columns: Iterable[str] = (), token_advantages: bool,
    optimizer_steps: Callable[[int], Mapping[str, int]], roles: Mapping[str, RoleNeed] | None = None,
) -> AlgorithmFacts:  # fmt: skip
    """Return the facts about an algorithm that planning reads. `columns`: the columns of this algorithm alone."""
    written = {"advantages", "old_logprobs", *columns}
    written |= {"reward:overlong"} if config.overlong.shapes else set()
    written |= {"old_kl_weight"} if config.covariance.method == "kl-cov" else set()
    written |= {"reward:kl", "token_rewards", "task_reward"} if config.kl_reward.weight else set()
    reference = wants_reference(config, loss)
    return AlgorithmFacts(
        inputs=frozenset({"rollouts"}),
        columns_written=frozenset(written | ({"reference_logprobs"} if reference else set())),
        columns_essential=frozenset({"advantages"}),
        weights_needed=frozenset({"reference"} if reference else ()),
        outputs_needed=frozenset({"entropy"} if config.top_entropy.share < 1 else ()),
        token_advantages=token_advantages or config.covariance.method == "clip-cov",
        group_size=group_size,
        groups_per_step=config.prompts_per_step,
        optimizer_steps=optimizer_steps,
        roles=roles or {},
    )


def policy_loss_facts(config: PolicyLossConfig, *, token_advantages: bool = True) -> LossFacts:
    """Return the facts about a loss of a policy that planning reads."""
    further = {"reference_logprobs"} if config.kl.weight else set()
    further |= {"reward"} if config.likelihood.weight else set()
    return LossFacts(
        outputs_needed=frozenset({"logprobs", "entropy"} if config.reads_entropy else {"logprobs"}),
        columns_read=frozenset({"advantages", "sampler_logprobs"} | further),
        token_advantages=token_advantages,
    )
