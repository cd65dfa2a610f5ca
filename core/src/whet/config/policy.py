"""Sections that algorithms fed by rollouts share: what happens between rewards and loss. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, gt, le

from whet.component import Problem, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, RECORDS, TOKENS, above, between

LARGEST_CHANGE = 5
"""Horizons of episodes in which the weight of `KlControlSection` falls to 0: its relative error counts as 0.2."""

if TYPE_CHECKING:
    from whet.config.sections import RolloutSection


@frozen
class OverlongSection:
    """What happens to answers that are too long."""

    mask: bool = False
    """Leave sequences that were cut by their length out of the loss (DAPO's overlong filtering). Their reward still
    counts in the baseline of their group."""
    penalty: float = field(default=0.0, validator=between(0, FACTOR))
    """Largest penalty for a long answer, taken from its reward (DAPO's soft overlong punishment); 0: none."""
    buffer: int = field(default=0, validator=between(0, TOKENS))
    """Tokens below `length` over which the penalty rises from 0 to its largest."""
    length: int = field(default=0, validator=between(0, TOKENS))
    """Longest answer, in tokens that the model produced in all turns of an episode; 0: `rollout.max_tokens`."""
    bounded: bool = True
    """Whether the penalty stays at its largest beyond `length`, as in DAPO's paper and TRL; else it goes on rising
    there, as in verl and NeMo RL."""


@frozen
class AverageConfig:
    """How a loss of each token becomes one number."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """`token`: the mean over all tokens of the batch. `sequence`: the mean over sequences of each one's mean, as in
    the paper of GRPO; tokens of short answers weigh more. `constant`: the sum over tokens divided by the number of
    sequences times `max_length`, as in Dr. GRPO."""
    max_length: int = field(default=0, validator=between(0, TOKENS))
    """Of the aggregation `constant`: tokens that each sequence counts as, e.g. `rollout.max_tokens`; 1: the mean over
    sequences of each one's sum."""
    count_empty: bool = False
    """Of the aggregations `sequence` and `constant`: whether sequences without a trained token count: those in which
    the model said nothing, as in TRL, NeMo RL and, of a whole optimizer step, in verl."""
    count_masked: bool | None = None
    """Whether sequences count whose tokens were all masked afterwards, by `overlong.mask` or a `correction`: true in
    TRL and verl, false in NeMo RL. Null: as `count_empty`."""


@frozen
class KlControlSection:
    """A weight that follows the divergence, so as to hold it at a target: the adaptive controller of Ziegler et al."""

    target: float = field(default=0.0, validator=between(0, FACTOR))
    """The divergence from the reference to hold, in nats; 0: the weight stays as it is."""
    horizon: float = field(default=10_000.0, validator=above(0, RECORDS))
    """Episodes in which the weight would change by the whole of the relative error, which counts as at most 0.2. A
    step has fewer than five times as many."""
    per: Literal["sequence", "token"] = "sequence"
    """What the divergence is of: an episode, summed over its tokens, as in the paper, or a token, averaged over each
    sequence first, as in verl."""


@frozen
class KlRewardSection:
    """A penalty in the reward for leaving the reference policy, token by token."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Taken from the reward for each nat; 0: no penalty, and no reference policy is needed. With `adaptive`: the weight
    of the first step."""
    adaptive: KlControlSection = Factory(KlControlSection)
    """How the weight follows the divergence, if at all."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """How the divergence is estimated from one token; k1 is the one whose gradient, in the reward, is right."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of log policy - log reference, in nats; 0: none."""
    clamp: float = field(default=10.0, validator=between(0, FACTOR))
    """Bound of the estimate, in nats; 0: none."""


@frozen
class KlLossSection:
    """A penalty in the loss for leaving the reference policy: a term of its own, averaged as the loss is."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Of a nat per token; 0: no penalty, and no reference policy is needed."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """How the divergence is estimated from one token."""
    importance: Literal["none", "score", "ratio", "sampler", "sequence"] = "none"
    """What an estimate by k1 or k3 is multiplied by, with its gradient. `none`: nothing. `score`: a weight of value 1
    whose gradient is that of sampling, which makes the gradient right on policy. `ratio`: new over old probability,
    which makes it right off policy, too. `sampler`: new probability over that of the generator, whosever the old
    logprobs are, as NeMo RL's on-policy approximation has it. `sequence`: the geometric mean of the sequence's ratios,
    as TRL has it with ratios of sequences."""
    straight_through: bool = False
    """Take the gradient of k2 whatever the estimator, as verl's `k3+`; it is right on policy."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of log policy - log reference, in nats, beyond which a token gets no gradient; 0: none."""
    clamp: float = field(default=10.0, validator=between(0, FACTOR))
    """Bound of the estimate, in nats, beyond which a token gets no gradient; 0: none."""


@frozen
class LikelihoodSection:
    """A second term: the negative log-likelihood of answers that were right, as in VAPO."""

    weight: float = field(default=0.0, validator=between(0, FACTOR))
    """Of its mean over the tokens of right answers; 0: no such term. VAPO has 0.1."""
    at_least: float = field(default=1.0, validator=le(FACTOR), metadata={"infinite": True})
    """The smallest reward of a right answer, a penalty for its length included, one for leaving the reference not.
    `-.inf`: all answers."""


@frozen
class TopEntropySection:
    """Learning from the tokens alone at which the policy was least sure: those of the highest entropy."""

    share: float = field(default=1.0, validator=above(0, 1))
    """Share of the trained tokens of a step that teach, those of the highest entropy; 1: all. The paper has 0.2. Below
    1 the trainer scores the entropy of each batch before it trains on it."""
    count_rest: bool = True
    """Whether the other tokens still count in the loss's mean, as in the paper and TRL. Else they leave the loss
    whole, its penalties included."""


@frozen
class CorrectionSection:
    """What happens where the trainer's logprobs differ from the sampler's. Where a batch gets one optimizer step, every
    token stays in the mean and weights are not normalised, the training pass gives them; else the trainer scores each
    batch before.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    """Multiply the loss by trainer's over sampler's probability of each token, or of the whole sequence, truncated."""
    cap: float = field(default=2.0, validator=gt(0), metadata={"infinite": True})
    """Largest weight; `.inf`: none."""
    floor: float = field(default=0.0, validator=between(0, FACTOR))
    """Smallest weight."""
    normalise: bool = False
    """Divide the weights by their mean over the batch, so that it is 1, as verl can. What `mask` takes out counts as a
    weight of 0, unless it counts nowhere (`count_masked`)."""
    mask: Literal["none", "token", "sequence", "product", "worst"] = "none"
    """Take out what is outside `low` to `high`: tokens by their own ratio (IcePop), sequences by the geometric mean of
    their tokens' ratios, or by the `product`, or by the `worst` of them."""
    measure: Literal["ratio", "k2", "k3"] = "ratio"
    """What `mask` looks at: ratios, or an estimate of the divergence in nats, which must be at most `high`: of a token,
    for `sequence` the mean over its tokens, for `product` the sum, for `worst` the largest."""
    low: float = field(default=0.5, validator=between(0, FACTOR))
    """Smallest ratio that stays."""
    high: float = field(default=5.0, validator=above(0, FACTOR))
    """Largest ratio, or divergence, that stays."""
    count_masked: bool = True
    """Whether what `mask` takes out still counts in the loss's mean, as in TRL and NeMo RL; not so in verl."""
    max_token_gap: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence with a token whose logprobs differ by more nats than this; 0: no bound."""
    max_mean_gap: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence whose tokens' logprobs differ by more nats than this on average; 0: no bound."""
    max_mean_error: float = field(default=0.0, validator=between(0, FACTOR))
    """Drop a sequence whose tokens' probabilities differ by a larger factor than this on average, as in NeMo RL; 0: no
    bound."""

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done."""
        return self.weights != "none" or self.mask != "none" or self.guards

    @property
    def drops(self) -> bool:
        """Whether tokens may leave the loss's mean."""
        return self.guards or (self.mask != "none" and not self.count_masked)

    @property
    def whole(self) -> bool:
        """Whether it must know the whole batch: what leaves the mean, or the mean of weights."""
        return self.drops or self.normalise

    @property
    def guards(self) -> bool:
        """Whether sequences may be dropped."""
        return bool(self.max_token_gap or self.max_mean_gap or self.max_mean_error)

    @property
    def per_token(self) -> bool:
        """Whether tokens of one sequence come out with different weights."""
        return self.weights == "token" or (self.mask == "token" and self.count_masked)


@frozen
class PolicyLossConfig(AverageConfig):
    """What all losses of a policy have in common."""

    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of the logarithm of a ratio, of a token or of a sequence, in nats, beyond which there is no gradient, as in
    verl; 0: none, as in TRL and NeMo RL."""
    kl: KlLossSection = Factory(KlLossSection)
    """A penalty for leaving the reference policy; the one in the reward is `algorithm.kl_reward`."""
    likelihood: LikelihoodSection = Factory(LikelihoodSection)
    """A likelihood term on right answers."""
    entropy: bool = False
    """Also report the policy's mean entropy, in nats."""


@frozen(slots=False)  # a second base beside one with slots
class ClipSection:
    """The clipping of a ratio of each token."""

    clip_low: float = field(default=0.2, validator=[ge(0), le(1)])
    """A ratio below 1 minus this is no longer pushed down."""
    clip_high: float = field(default=0.2, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up; above `clip_low` it is the clip-higher of DAPO."""
    clip_dual: float = field(default=0.0, validator=between(0, FACTOR))
    """A bad token whose ratio is above this is no longer pushed down, either: dual clipping, usually 3; 0: off."""


@frozen
class PolicyConfig:
    """What all policy gradient algorithms have in common."""

    prompts_per_step: int = field(default=32, validator=between(1, BATCH))
    """Groups that one step consumes."""
    epochs: int = field(default=1, validator=between(1, GROUP))
    """Passes of the policy over each batch."""
    filters: list[Selection] = field(
        factory=list, metadata={"kind": "filters", "default": None, "inline": False}, kw_only=True
    )
    """Which groups to leave out; each is replaced by another, so a step always has `prompts_per_step` groups."""
    overlong: OverlongSection = Factory(OverlongSection)
    """What happens to answers that are too long."""
    kl_reward: KlRewardSection = Factory(KlRewardSection)
    """A penalty in the reward of each token for leaving the reference policy; the one in the loss is `loss.kl`."""
    correction: CorrectionSection = Factory(CorrectionSection)
    """What happens where the trainer's logprobs differ from the sampler's."""
    top_entropy: TopEntropySection = Factory(TopEntropySection)
    """Whether only tokens of high entropy teach the policy; a critic learns from all."""
    old_logprobs: Literal["auto", "trainer", "sampler"] = "auto"
    """Whose logprobs the policy's ratio is taken against. `trainer`: those of the weights before the step, at the
    cost of a forward pass where a batch gets several optimizer steps, or a `correction` that the training pass cannot
    make; else the ratio is 1 by construction and nothing is computed. `sampler`: those recorded while sampling, which
    also corrects for stale weights, and for a generator that rounds differently. `auto`: `trainer` at
    `rollout.max_staleness` 0 and with a `correction`, else `sampler`."""


def shaping_problems(
    overlong: OverlongSection, correction: CorrectionSection, rollout: "RolloutSection"
) -> Iterator[Problem]:
    """Find numbers of these sections that do not go together, with paths below `algorithm`."""
    longest = overlong.length or rollout.max_tokens
    if overlong.penalty and overlong.buffer > longest:
        yield Problem("algorithm.overlong.buffer", f"is {overlong.buffer}, more than the {longest} tokens of an answer")
    if overlong.buffer and not overlong.penalty:
        yield Problem("algorithm.overlong.buffer", "has no effect without a penalty; set algorithm.overlong.penalty")
    if not overlong.bounded and not (overlong.penalty and overlong.buffer):
        words = "has an effect only on a penalty that rises over a buffer; set algorithm.overlong.penalty and .buffer"
        yield Problem("algorithm.overlong.bounded", words)
    yield from _correction_problems(correction)


def kl_reward_problems(section: KlRewardSection, prompts: int, samples: int) -> Iterator[Problem]:
    """Find numbers of a penalty in the reward that do not go together, with paths below `algorithm`.

    A step has `prompts` x `samples` episodes.
    """
    control = section.adaptive
    if control.target and section.weight and prompts * samples >= LARGEST_CHANGE * control.horizon:
        yield Problem(
            "algorithm.kl_reward.adaptive.horizon",
            f"is {control.horizon:g}, and a step has {prompts} x {samples} episodes: one of "
            f"{LARGEST_CHANGE * control.horizon:g} or more can turn the weight to 0 or below; wanted more than "
            f"{prompts * samples / LARGEST_CHANGE:g}, better many times that",
        )
    if section.adaptive.target and not section.weight:
        words = "has no effect on a weight of 0, which it multiplies; set algorithm.kl_reward.weight"
        yield Problem("algorithm.kl_reward.adaptive.target", words)


def kl_loss_problems(section: KlLossSection) -> Iterator[Problem]:
    """Find settings of a penalty in the loss that do not go together, with paths below `algorithm.loss`."""
    if section.straight_through and section.estimator == "k2":
        yield Problem("algorithm.loss.kl.straight_through", "changes nothing for k2, whose own gradient it takes")
    if section.importance == "none":
        return
    if section.straight_through:
        words = f"takes a gradient that is right by itself, and kl.importance: {section.importance} counts it twice"
        yield Problem("algorithm.loss.kl.straight_through", f"{words}; choose one of the two")
    elif section.estimator == "k2":
        words = f"is {section.importance}, and the gradient of k2 is right without; choose none, or k1 or k3"
        yield Problem("algorithm.loss.kl.importance", words)


def top_entropy_problems(section: TopEntropySection, loss: object) -> Iterator[Problem]:
    """Find what would be taken over the uncertain tokens of an answer alone, and is meant of all its tokens."""
    if section.share >= 1 or section.count_rest:
        return
    kl, off_policy = getattr(loss, "kl", None), getattr(loss, "off_policy", None)
    taken = {
        "algorithm.loss.kl.importance: sequence": kl is not None and kl.weight and kl.importance == "sequence",
        "algorithm.loss.off_policy": off_policy is not None and off_policy.threshold is not None,
        "the ratio of a sequence": getattr(loss, "level", "") == "token" and hasattr(loss, "ratio"),
    }
    for what in (name for name, is_set in taken.items() if is_set):
        words = f"is false, which takes tokens out of the loss mask, and {what} is a mean over an answer's tokens"
        yield Problem("algorithm.top_entropy.count_rest", f"{words}; choose true")


def average_problems(path: str, loss: AverageConfig, rollout: "RolloutSection") -> Iterator[Problem]:
    """Find settings of a loss's average that do not go together, with paths below that of the loss."""
    if loss.aggregation == "constant" and not loss.max_length:
        say = f"e.g. to rollout.max_tokens, which is {rollout.max_tokens}"
        yield Problem(f"{path}.max_length", f"is 0, and the aggregation `constant` divides by it; set it, {say}")
    if loss.aggregation == "token":
        for name in ("count_empty", "count_masked"):
            if getattr(loss, name):
                yield Problem(f"{path}.{name}", "has no effect on the aggregation `token`, which counts tokens")


def _correction_problems(correction: CorrectionSection) -> Iterator[Problem]:
    if correction.normalise and correction.weights == "none":
        yield Problem(
            "algorithm.correction.normalise", "has no effect without weights; set algorithm.correction.weights"
        )
    if correction.measure != "ratio" and correction.mask == "none":
        yield Problem("algorithm.correction.measure", "has no effect without a mask; set algorithm.correction.mask")
    if 0 < correction.max_mean_error < 1:
        words = (
            f"is {correction.max_mean_error:g}, and no mean factor is below 1; choose a larger one, or 0 for no bound"
        )
        yield Problem("algorithm.correction.max_mean_error", words)
    if correction.floor > correction.cap:
        yield Problem("algorithm.correction.floor", f"is {correction.floor:g}, above the cap of {correction.cap:g}")
    if correction.measure == "ratio" and correction.low > correction.high:
        yield Problem("algorithm.correction.low", f"is {correction.low:g}, above `high`, which is {correction.high:g}")
