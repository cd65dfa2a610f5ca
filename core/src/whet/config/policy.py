"""Sections that algorithms fed by rollouts share: what happens between rewards and loss. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt

from whet.component import Problem

if TYPE_CHECKING:
    from whet.config.sections import RolloutSection


@frozen
class OverlongSection:
    """What happens to answers that are too long."""

    mask: bool = False
    """Leave sequences that were cut by their length out of the loss (DAPO's overlong filtering). Their reward still
    counts in the baseline of their group."""
    penalty: float = field(default=0.0, validator=ge(0))
    """Largest penalty for a long answer, taken from its reward (DAPO's soft overlong punishment); 0: none."""
    buffer: int = field(default=0, validator=ge(0))
    """Tokens below `length` over which the penalty rises from 0 to its largest."""
    length: int = field(default=0, validator=ge(0))
    """Longest answer, in tokens that the model produced in all turns of an episode; 0: `rollout.max_tokens`."""
    bounded: bool = True
    """Whether the penalty stays at its largest beyond `length`, as in DAPO's paper and TRL; else it goes on rising
    there, as in verl and NeMo RL."""


@frozen
class KlRewardSection:
    """A penalty in the reward for leaving the reference policy, token by token."""

    weight: float = field(default=0.0, validator=ge(0))
    """Taken from the reward for each nat; 0: no penalty, and no reference policy is needed."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """How the divergence is estimated from one token; k1 is the one whose gradient, in the reward, is right."""
    clamp_log_ratio: float = field(default=20.0, validator=ge(0))
    """Bound of log policy - log reference, in nats; 0: none."""
    clamp: float = field(default=10.0, validator=ge(0))
    """Bound of the estimate, in nats; 0: none."""


@frozen
class CorrectionSection:
    """What happens where the trainer's logprobs differ from the sampler's. Where a batch gets one optimizer step, every
    token stays in the mean and weights are not normalised, the training pass gives them; else the trainer scores each
    batch before.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    """Multiply the loss by trainer's over sampler's probability of each token, or of the whole sequence, truncated."""
    cap: float = field(default=2.0, validator=gt(0))
    """Largest weight."""
    floor: float = field(default=0.0, validator=ge(0))
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
    low: float = field(default=0.5, validator=ge(0))
    """Smallest ratio that stays."""
    high: float = field(default=5.0, validator=gt(0))
    """Largest ratio, or divergence, that stays."""
    count_masked: bool = True
    """Whether what `mask` takes out still counts in the loss's mean, as in TRL and NeMo RL; not so in verl."""
    max_token_gap: float = field(default=0.0, validator=ge(0))
    """Drop a sequence with a token whose logprobs differ by more nats than this; 0: no bound."""
    max_mean_gap: float = field(default=0.0, validator=ge(0))
    """Drop a sequence whose tokens' logprobs differ by more nats than this on average; 0: no bound."""
    max_mean_error: float = field(default=0.0, validator=ge(0))
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
