"""Losses per token: pure functions of logprobs and advantages. Needs torch; only workers import it."""

from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from whet_ops.kl import LARGEST_EXPONENT, MAX_LOG_RATIO, MOST_NATS, log_ratio
from whet_ops.reductions import expand, segment_mean, segment_sum

LEAST_LOGPROB = -1.0e4
"""Lower bound of a logprob that is a factor of a loss. Below it there is no gradient. -inf would make the loss nan."""
LEAST_PROBABILITY = 1.0e-8
"""Added to the probability of all tokens but one, so that its logarithm is finite."""

__all__ = [
    "MAX_LOG_RATIO",
    "PolicyGradient",
    "binary_divergence",
    "cispo",
    "clipped_policy_gradient",
    "dppo",
    "gmpo",
    "near_policy",
    "reinforce",
    "sapo",
    "sequence_ratio",
    "token_ratio",
    "vespo",
]


@frozen(eq=False)
class PolicyGradient:
    """The result of a policy-gradient loss."""

    loss: Tensor
    """[N], the loss of each token."""
    ratio: Tensor
    """[N], new over old probability, without gradient."""
    clipped_low: Tensor
    """[N] bool, true where clipping changed the loss because the ratio was too small, or where dual clipping did."""
    clipped_high: Tensor
    """[N] bool, true where clipping changed the loss because the ratio was too large."""

    @property
    def clipped(self) -> Tensor:
        """Return whether clipping changed the loss of each token: [N] bool."""
        return self.clipped_low | self.clipped_high


def clipped_policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute the clipped surrogate of PPO per token. logprobs, old_logprobs, advantages [N] -> [N].

        ratio = exp(logprobs - old_logprobs)
        loss  = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        and where A < 0 and clip_dual:  loss = min(loss, -clip_dual * A)

    Schulman et al. 2017, equation 7 (arXiv:1707.06347); `clip_high` larger than `clip_low` is the clip-higher of DAPO
    (Yu et al. 2025, arXiv:2503.14476, section 3.1). `clip_dual` is the dual clip of Ye et al. 2020 (arXiv:1912.09729):
    a token of negative advantage gets no gradient if its ratio is above `clip_dual`. 0: off (NeMo RL, TRL); verl has 3.
    The loss is always computed in float32. Log-ratios are clamped to plus or minus `limit` (verl: 20). Beyond the
    limit, the token gets no gradient. 0: no clamp, as in TRL and NeMo RL.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = token_ratio(logprobs, old_logprobs, limit)
    return clip_ratio(ratio, advantages.float(), clip_low, clip_high, clip_dual)


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Return exp(logprobs - old_logprobs) [N], with log-ratios clamped to plus or minus `limit`; 0: no clamp."""
    ratio: Tensor = log_ratio(logprobs, old_logprobs, limit or LARGEST_EXPONENT).exp()
    return ratio


def clip_ratio(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float = 0.0
) -> PolicyGradient:
    """Compute the clipped surrogate from given ratios; see `clipped_policy_gradient`."""
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
    limit: float = MAX_LOG_RATIO,
) -> Tensor:
    """Return the ratio of GSPO at each token of its sequence. logprobs, old_logprobs, mask [N], lengths [B] -> [N].

        s = exp(mean over the sequence's tokens of (logprobs - old_logprobs))

    Zheng et al. 2025, equation 7 (arXiv:2507.18071). `per_token`: the ratio of GSPO-token, equation 14. Its value is s,
    and its gradient is the gradient of each token's own logprob. If all tokens of a sequence have the same advantage
    and weight, GSPO and GSPO-token have the same gradient. `product`: s has the sum in place of the mean. Then s is the
    ratio of the probabilities of whole sequences, as in TRL's RLOO. The longer a sequence, the further s is from 1.
    Only tokens under the mask count. The mean, or the sum, is clamped to plus or minus `limit`; its terms are not.
    Beyond the limit, the sequence gets no gradient. 0: no clamp.
    """
    change = log_ratio(logprobs, old_logprobs, MOST_NATS)
    bound = limit or LARGEST_EXPONENT
    whole = segment_sum(torch.where(mask, change, 0.0), lengths) if product else segment_mean(change, lengths, mask)
    exponent = expand(whole.clamp(-bound, bound), lengths)
    if per_token:
        inside = expand(whole.detach().abs() < bound, lengths)
        exponent = exponent.detach() + torch.where(inside, change - change.detach(), 0.0)
    ratio: Tensor = exponent.exp()
    return ratio


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute REINFORCE with a clipped importance weight. logprobs, old_logprobs, advantages [N] -> [N].

        weight = clip(exp(logprobs - old_logprobs), 1 - clip_low, 1 + clip_high), without gradient
        loss   = -weight * A * logprobs

    CISPO: MiniMax 2025, equations 4 and 5 (arXiv:2506.13585). Every token keeps a gradient; only its weight is bounded.
    The paper has no lower bound, that is `clip_low` 1. TRL's setting is the upper bound 1 + `clip_high` itself.
    `limit` is as in `clipped_policy_gradient`.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = token_ratio(logprobs, old_logprobs, limit).detach()
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages.float() * finite(logprobs)
    return PolicyGradient(loss, ratio, ratio < 1 - clip_low, ratio > 1 + clip_high)


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    max_weight: float | None = None,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute REINFORCE with a correction for stale samples. logprobs, old_logprobs, advantages [N] -> [N].

        weight = min(exp(logprobs - old_logprobs), max_weight), without gradient; 1 where max_weight is None
        loss   = -weight * A * logprobs

    Williams 1992. Truncated importance weights: Ionides 2008; V-trace, Espeholt et al. 2018 (arXiv:1802.01561).
    `limit` is as in `clipped_policy_gradient`.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = token_ratio(logprobs, old_logprobs, limit).detach()
    weight = torch.ones_like(ratio) if max_weight is None else ratio.clamp(max=max_weight)
    above = torch.zeros_like(ratio, dtype=torch.bool) if max_weight is None else ratio > max_weight
    return PolicyGradient(-weight * advantages.float() * finite(logprobs), ratio, torch.zeros_like(above), above)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute the soft surrogate of SAPO per token. logprobs, old_logprobs, advantages [N] -> [N].

        ratio = exp(logprobs - old_logprobs)
        loss  = -(4 / t) * sigmoid(t * (ratio - 1)) * A
        t     = temperature_positive where A > 0, else temperature_negative

    Gao et al. 2025 (arXiv:2511.20347). The defaults are the paper's temperatures. There is no clipping: the gradient
    fades as the ratio moves away from 1. The weight of the gradient is 4 p (1 - p) times the ratio, where p is the
    sigmoid. On policy, the weight is 1. The higher the temperature, the faster the gradient fades. No token counts as
    clipped. `limit` is as in `clipped_policy_gradient`.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio, advantages = token_ratio(logprobs, old_logprobs, limit), advantages.float()
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyGradient(-gate * advantages, ratio.detach(), never, never)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute the surrogate of GMPO at each token of its sequence. logprobs ... mask [N], lengths [B] -> [N].

        d     = logprobs - old_logprobs
        d'    = min(d, clip(d, -clip_low, clip_high)) where A > 0
                max(d, clip(d, -clip_low, clip_high)) where A < 0
        ratio = exp(mean over the sequence's tokens of d')
        loss  = -ratio * A

    Zhao et al. 2025 (arXiv:2507.20673): the geometric mean of ratios, each clipped per token before the product. The
    bounds apply to the log-ratio, in nats. The paper's bounds of the ratio are exp(-0.4) and exp(0.4). A clipped token
    gets no gradient; the other tokens of its sequence do. Only tokens under the mask count. The mean is clamped to plus
    or minus `limit`; 0: no clamp.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    change, advantages = log_ratio(logprobs, old_logprobs, MOST_NATS), advantages.float()
    low, high = (advantages < 0) & (change < -clip_low), (advantages > 0) & (change > clip_high)
    bounded = torch.where(low, -clip_low, torch.where(high, clip_high, change))
    bound = limit or LARGEST_EXPONENT
    ratio = expand(segment_mean(bounded, lengths, mask).clamp(-bound, bound), lengths).exp()
    return PolicyGradient(-ratio * advantages, ratio.detach(), low.detach(), high.detach())


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    power: tuple[float, float] = (2.0, 3.0),
    decay: tuple[float, float] = (3.0, 2.0),
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute REINFORCE with the gamma-shaped weight of VESPO. logprobs ... mask [N], lengths [B] -> [N].

        W      = product over the sequence's tokens of exp(logprobs - old_logprobs)
        weight = W**power * exp(decay * (1 - W)), without gradient
        loss   = -weight * A * logprobs

    Shen et al. 2026 (arXiv:2602.10693); their code and TRL. `power` and `decay` are a pair each: for sequences of
    advantage at least 0, and for the others. The weight is 1 on policy. It is largest at W = power / decay, and falls
    to 0 on both sides. No token counts as clipped. Only tokens under the mask count. The sum of the log-ratios is
    clamped to plus or minus `limit`, and its terms are not; 0: no clamp.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    bound = min(limit or LARGEST_EXPONENT, LARGEST_EXPONENT)
    ratio = sequence_ratio(logprobs, old_logprobs, mask, lengths, product=True, limit=bound).detach()
    good, advantages = advantages >= 0, advantages.float()
    rises, falls = torch.where(good, power[0], power[1]), torch.where(good, decay[0], decay[1])
    exponent = rises * ratio.log() + falls * (1 - ratio)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -exponent.clamp(max=LARGEST_EXPONENT).exp() * advantages * finite(logprobs)
    return PolicyGradient(loss, ratio, never, never)


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    divergence: Literal["tv", "kl"] = "tv",
    low: float = 0.15,
    high: float = 0.15,
    max_weight: float | None = 20.0,
    limit: float = MAX_LOG_RATIO,
) -> PolicyGradient:
    """Compute REINFORCE within a trust region of probabilities. logprobs, old_logprobs, advantages [N] -> [N].

        p, q   = exp(logprobs), exp(old_logprobs)
        D      = |p - q|                                              tv
                 q log(q / p) + (1 - q) log((1 - q) / (1 - p))        kl
        weight = min(p / q, max_weight), without gradient
        loss   = -weight * A * logprobs, and 0 where A > 0, p > q and D > high, or where A < 0, p < q and D > low

    DPPO: Qi et al. 2026 (arXiv:2602.04879), with its binary divergences: those of the sampled token from all others.
    The paper's bounds are 0.15 for `tv` and 0.05 for `kl`. A ratio bounds rare tokens more than frequent ones, and a
    divergence does not. A token counts as clipped where its loss is 0 for this reason. `limit` is as in
    `clipped_policy_gradient`.
    """
    _same_shape(logprobs, old_logprobs, advantages)
    ratio = token_ratio(logprobs, old_logprobs, limit).detach()
    new, old, advantages = finite(logprobs.detach()), finite(old_logprobs), advantages.float()
    distance = binary_divergence(new, old, divergence)
    above, below = (advantages > 0) & (new > old) & (distance > high), (advantages < 0) & (new < old) & (distance > low)
    weight = ratio if max_weight is None else ratio.clamp(max=max_weight)
    loss = torch.where(above | below, 0.0, -weight * advantages * finite(logprobs))
    return PolicyGradient(loss, ratio, below, above)


def binary_divergence(logprobs: Tensor, old_logprobs: Tensor, divergence: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence of two distributions over the sampled token and all others; see `dppo`. [N], [N] -> [N]."""
    old = old_logprobs.exp()
    if divergence == "tv":
        return (logprobs.exp() - old).abs()
    # -expm1 is the probability of all others, also where it is small
    others, old_others = (-one.clamp(max=0.0).expm1() + LEAST_PROBABILITY for one in (logprobs, old_logprobs))
    return old * (old_logprobs - logprobs) + (1 - old) * (old_others / others).log()


def near_policy(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor, threshold: float
) -> Tensor:
    """Return whether off-policy sequence masking keeps each token. logprobs ... mask [N], lengths [B] -> [N] bool.

        removed where A < 0 and mean over the sequence's tokens of (sampled - logprobs) > threshold

    DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1 (arXiv:2512.02556). The mask removes bad responses that the policy
    would hardly produce any more. Good responses always stay. `sampled` are the logprobs of the policy that sampled the
    tokens. The mean estimates KL(sampled || policy) in nats per token. Only tokens under the mask count. The result has
    no gradient.
    """
    distance = segment_mean(log_ratio(sampled.detach(), logprobs.detach(), MOST_NATS), lengths, mask)
    near: Tensor = (advantages >= 0) | expand(distance <= threshold, lengths)
    return near


def finite(logprobs: Tensor) -> Tensor:
    """Return logprobs in float32 as a finite factor of a loss: -inf becomes `LEAST_LOGPROB`, without gradient."""
    return logprobs.float().clamp(min=LEAST_LOGPROB)


def _same_shape(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> None:
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (logprobs, old_logprobs, advantages))
        raise ValueError(f"logprobs, old_logprobs and advantages must be [N] alike, found {shapes}")
