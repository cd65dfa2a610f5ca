"""Losses per token, on torch: pure functions of logprobs and advantages. Needs torch; only workers import it."""

import torch
from attrs import frozen
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, where the gradient becomes 0; exp(20) is 5e8, so nothing overflows."""


@frozen(eq=False)
class PolicyGradient:
    """What `clipped_policy_gradient` gives."""

    loss: Tensor
    """Of each token: [N]."""
    ratio: Tensor
    """New over old probability, without gradient: [N]."""
    clipped: Tensor
    """Where clipping took the gradient away: [N] bool."""


def clipped_policy_gradient(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyGradient:
    """Compute the clipped surrogate of PPO per token. logprobs, old_logprobs, advantages [N] -> [N].

        ratio = exp(logprobs - old_logprobs)
        loss  = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    Schulman et al. 2017, equation 7 (arXiv:1707.06347); `clip_high` larger than `clip_low` is the clip-higher of
    DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.1). Computed in float32 whatever comes in. Log-ratios are
    clamped to plus or minus 20: beyond, the ratio is that of 20 and the token gets no gradient.
    """
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (logprobs, old_logprobs, advantages))
        raise ValueError(f"logprobs, old_logprobs and advantages must be [N] alike, found {shapes}")
    log_ratio = (logprobs.float() - old_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = advantages.float()
    ratio = log_ratio.exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = (bounded < free).detach()
    return PolicyGradient(-torch.minimum(free, bounded), ratio.detach(), clipped)
