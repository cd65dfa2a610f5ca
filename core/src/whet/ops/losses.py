"""Losses per token, on torch: pure functions of logprobs and advantages. Needs torch; only workers import it."""

import torch
from attrs import frozen
from torch import Tensor

from whet.ops.kl import MAX_LOG_RATIO, log_ratio
from whet.ops.reductions import expand, segment_mean, segment_sum

LEAST_LOGPROB = -1.0e4
"""Where a logprob itself is in a loss, one below this stands at this, without gradient: -inf would be no number."""

__all__ = ["MAX_LOG_RATIO", "PolicyGradient", "cispo", "clipped_policy_gradient", "reinforce", "sequence_ratio"]


@frozen(eq=False)
class PolicyGradient:
    """What a policy-gradient loss gives."""

    loss: Tensor
    """Of each token: [N]."""
    ratio: Tensor
    """New over old probability, without gradient: [N]."""
    clipped_low: Tensor
    """Where clipping changed something because the ratio was too small, or dual clipping did: [N] bool."""
    clipped_high: Tensor
    """Where clipping changed something because the ratio was too large: [N] bool."""

    @property
    def clipped(self) -> Tensor:
        """Where clipping changed something: [N] bool."""
        return self.clipped_low | self.clipped_high


def clipped_policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> PolicyGradient:
    """Compute the clipped surrogate of PPO per token. logprobs, old_logprobs, advantages [N] -> [N].

        ratio = exp(logprobs - old_logprobs)
        loss  = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        and where A < 0 and clip_dual:  loss = min(loss, -clip_dual * A)

    Schulman et al. 2017, equation 7 (arXiv:1707.06347); `clip_high` larger than `clip_low` is the clip-higher of
    DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1). `clip_dual` is the dual clip of Ye et al. 2020
    (arXiv:1912.09729): a bad token that has become much likelier is not pushed down without bound; 0: off (NeMo RL,
    TRL), verl has 3. Computed in float32 whatever comes in. Log-ratios are clamped to plus or minus 20: beyond, the
    ratio is that of 20 and the token gets no gradient.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    return clip_ratio(log_ratio(logprobs, old_logprobs).exp(), advantages.float(), clip_low, clip_high, clip_dual)


def clip_ratio(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyGradient:
    """Compute the clipped surrogate from ratios that are known; see `clipped_policy_gradient`."""
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = (bounded < free).detach()
    gain = torch.minimum(free, bounded)
    low, high = clipped & (ratio < 1), clipped & (ratio > 1)
    if clip_dual:
        floor = clip_dual * advantages
        dual = ((advantages < 0) & (gain < floor)).detach()
        gain, low = torch.where(dual, floor, gain), low | dual
    return PolicyGradient(-gain, ratio.detach(), low, high)


def sequence_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    lengths: Tensor,
    per_token: bool = False,
    product: bool = False,
) -> Tensor:
    """Give the ratio of GSPO at each token of its sequence. logprobs, old_logprobs, mask [N], lengths [B] -> [N].

        s = exp(mean over the sequence's tokens of (logprobs - old_logprobs))

    Zheng et al. 2025, equation 7 (arXiv:2507.18071). `per_token`: the ratio of GSPO-token, equation 14: the value is
    s, and the gradient that of each token's own logprob. Where all tokens of a sequence have one advantage and weight
    both have the same gradient. `product`: the sum in place of the mean, so that s is the ratio of the probabilities of
    whole sequences, as in TRL's RLOO; the longer they are, the further it strays from 1. Only tokens under the mask
    count; each one's log-ratio is clamped to plus or minus 20.
    """
    change = log_ratio(logprobs, old_logprobs)
    if product:
        whole = segment_sum(torch.where(mask, change, 0.0), lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    else:
        whole = segment_mean(change, lengths, mask)
    exponent = expand(whole, lengths)
    if per_token:
        exponent = exponent.detach() + change - change.detach()
    ratio: Tensor = exponent.exp()
    return ratio


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyGradient:
    """Compute REINFORCE with a clipped importance weight. logprobs, old_logprobs, advantages [N] -> [N].

        weight = clip(exp(logprobs - old_logprobs), 1 - clip_low, 1 + clip_high), without gradient
        loss   = -weight * A * logprobs

    CISPO: MiniMax 2025, equations 4 and 5 (arXiv:2506.13585). Every token keeps a gradient; what is bounded is its
    weight. The paper sets no lower bound, that is `clip_low` 1. TRL states the upper bound itself, 1 + `clip_high`.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages.float() * finite(logprobs)
    return PolicyGradient(loss, ratio, ratio < 1 - clip_low, ratio > 1 + clip_high)


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, max_weight: float | None = None
) -> PolicyGradient:
    """Compute REINFORCE, corrected for stale samples. logprobs, old_logprobs, advantages [N] -> [N].

        weight = min(exp(logprobs - old_logprobs), max_weight), without gradient; 1 where max_weight is None
        loss   = -weight * A * logprobs

    Williams 1992; truncated importance weights: Ionides 2008, and as `vtrace` Espeholt et al. 2018 (arXiv:1802.01561).
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    weight = torch.ones_like(ratio) if max_weight is None else ratio.clamp(max=max_weight)
    above = torch.zeros_like(ratio, dtype=torch.bool) if max_weight is None else ratio > max_weight
    return PolicyGradient(-weight * advantages.float() * finite(logprobs), ratio, torch.zeros_like(above), above)


def finite(logprobs: Tensor) -> Tensor:
    """Give logprobs in float32 that can stand in a loss: -inf becomes `LEAST_LOGPROB`, without gradient."""
    return logprobs.float().clamp(min=LEAST_LOGPROB)


def _same_shape(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> None:
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (logprobs, old_logprobs, advantages))
        raise ValueError(f"logprobs, old_logprobs and advantages must be [N] alike, found {shapes}")
