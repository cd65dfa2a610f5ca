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


@frozen
class KlRewardSection:
    """A penalty in the reward for leaving the reference policy, token by token."""

    weight: float = field(default=0.0, validator=ge(0))
    """Taken from the reward for each nat; 0: no penalty, and no reference policy is needed."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """How the divergence is estimated from one token; k1 is the one whose gradient, in the reward, is right."""
    clamp_log_ratio: float = field(default=20.0, validator=ge(0))
    """Bound of log policy - log reference, in nats; 0: none."""
    clamp: float = field(default=10.0, validator=ge(0))
    """Bound of the estimate, in nats; 0: none."""


@frozen
class CorrectionSection:
    """What happens where the trainer's logprobs differ from the sampler's. Any of it has the trainer score batches."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Multiply the loss by trainer's over sampler's probability of each token, or of the whole sequence, truncated."""
    cap: float = field(default=2.0, validator=gt(0))
    """Largest weight."""
    floor: float = field(default=0.0, validator=ge(0))
    """Smallest weight."""
    mask: Literal["none", "token", "sequence", "product"] = "none"
    """Take out what is outside `low` to `high`: tokens by their own ratio (IcePop), sequences by the geometric mean of
    their tokens' ratios, or by the product."""
    low: float = field(default=0.5, validator=ge(0))
    """Smallest ratio that stays."""
    high: float = field(default=5.0, validator=gt(0))
    """Largest ratio that stays."""
    count_masked: bool = True
    """Whether what `mask` takes out still counts in the loss's mean, as in TRL and NeMo RL; not so in verl."""
    max_token_gap: float = field(default=0.0, validator=ge(0))
    """Drop a sequence with a token whose logprobs differ by more nats than this; 0: no bound."""
    max_mean_gap: float = field(default=0.0, validator=ge(0))
    """Drop a sequence whose tokens' logprobs differ by more nats than this on average; 0: no bound."""

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done."""
        return self.weights != "none" or self.mask != "none" or bool(self.max_token_gap or self.max_mean_gap)

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
    if correction.floor > correction.cap:
        yield Problem("algorithm.correction.floor", f"is {correction.floor:g}, above the cap of {correction.cap:g}")
    if correction.low > correction.high:
        yield Problem("algorithm.correction.low", f"is {correction.low:g}, above `high`, which is {correction.high:g}")
