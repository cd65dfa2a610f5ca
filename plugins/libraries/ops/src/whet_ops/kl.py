"""Estimates of the KL divergence from single samples. NumPy in, NumPy out; torch in, torch out.

Of KL(p || q) with a token x drawn from p, and d = log p(x) - log q(x) (Schulman 2020, joschu.net/blog/kl-approx):

    k1 = d                       unbiased, large variance, may be negative
    k2 = d**2 / 2                biased, small variance
    k3 = exp(-d) - 1 + d         unbiased, small variance, never negative
    abs = |d|                    no estimate of a divergence; verl offers it

The *gradients* of these as a loss are another matter (Tang & Munos 2025, arXiv:2506.09477). With x drawn from p, the
mean of the gradient of k1 is 0: it regularises nothing. That of k2 is the gradient of KL(p || q). That of k3 is the
gradient of KL(q || p). `penalty_of_kl` has the two ways in which the field gives k1 and k3 the gradient of KL(p || q).
"""

from typing import Any, Literal

import numpy as np

Estimator = Literal["k1", "k2", "k3", "abs"]
Importance = Literal["none", "score", "ratio"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this, where the gradient becomes 0. exp(20) is 5e8, so nothing overflows."""
LARGEST_EXPONENT = 60.0
"""Bound of a log-ratio in an exponential where no clamp is wanted. exp(60) is 1e26, and products with other factors
stay finite in float32."""
MOST_NATS = 1.0e4
"""Bound of log-ratios that are summed or averaged before they are clamped. A token that cannot occur must not make the
sum infinite."""


def log_ratio(logprobs: Any, others: Any, limit: float = MAX_LOG_RATIO) -> Any:
    """Return logprobs - others [N] in float32, clamped to plus or minus `limit`, without gradient beyond.

    Logprobs of -inf are allowed: on one side they give the limit, on both sides 0. 0 as `limit`: no clamp. If the
    result is summed or averaged before its final clamp, use `MOST_NATS`.
    """
    if isinstance(logprobs, np.ndarray):
        # -inf minus -inf is defined as 0 here.
        with np.errstate(invalid="ignore"):
            difference = np.asarray(logprobs, np.float32) - np.asarray(others, np.float32)
        bound = limit or float(np.finfo(np.float32).max)
        return np.nan_to_num(difference, nan=0.0, posinf=bound, neginf=-bound).clip(-bound, bound)
    difference = logprobs.float() - others.float()
    if not limit:
        return difference.nan_to_num()
    return difference.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)


def kl_estimate(log_ratios: Any, estimator: Estimator, clamp: float = 0.0) -> Any:
    """Estimate KL(p || q) for each token. log_ratios [N] of log p - log q -> [N] nats.

    `clamp` bounds the estimate to plus or minus this, without gradient beyond; 0: no bound.
    """
    d = log_ratios
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = d * d / 2
    elif estimator == "abs":
        estimate = abs(d)
    else:
        # expm1 keeps small divergences, where exp(-d) - 1 + d would only be rounding errors. Its exponent is bounded,
        # because the gradient beyond `clamp` would be an infinity times 0.
        bounded = d.clip(-LARGEST_EXPONENT, None)
        estimate = (np.expm1(-bounded) if isinstance(d, np.ndarray) else (-bounded).expm1()) + bounded
    return estimate.clip(-clamp, clamp) if clamp else estimate


def penalty_of_kl(
    logprobs: Any,
    reference: Any,
    old_logprobs: Any,
    estimator: Estimator = "k3",
    *,
    importance: Importance = "none",
    straight_through: bool = False,
    limit: float = MAX_LOG_RATIO,
    clamp: float = 0.0,
    ratio: Any = None,
) -> Any:
    """Estimate KL(policy || reference) for each token, as a loss. All [N], torch -> [N] nats.

    `importance` multiplies the estimate by the policy's probability over that of the sampling policy, with gradient:

        none    1: the gradient is that of the estimate alone       GRPO section 4.1.1 (arXiv:2402.03300), TRL, verl
        score   exp(logprobs - logprobs without gradient): the value is unchanged; the gradient gains the part of
                sampling, and is that of KL(policy || reference) on policy     NeMo RL; arXiv:2506.09477
        ratio   exp(logprobs - old_logprobs): the same, off policy        DeepSeek-V3.2 section 3.1
                                    (arXiv:2512.02556), TRL's use_bias_correction_kl, NeMo RL's on-policy approximation

    `ratio` [N], with gradient, replaces exp(logprobs - old_logprobs), e.g. with the ratio of whole sequences.
    `straight_through` keeps the value and takes the gradient of k2, as verl's `k1+` and `k3+`. `limit` clamps the
    log-ratio of policy and reference (NeMo RL, and verl for k3: 20), `clamp` the estimate times its weight (NeMo RL and
    verl: 10; TRL: neither). The weight itself has no clamp, as in NeMo RL and TRL; it only stays finite in float32.
    Beyond either clamp a token gets no gradient, nor does its weight (NeMo RL), unless the gradient is that of k2.
    """
    d = log_ratio(logprobs, reference, limit)
    estimate = kl_estimate(d, estimator, clamp if importance == "none" else 0.0)
    if straight_through:
        slope = kl_estimate(d, "k2")
        estimate = estimate.detach() + slope - slope.detach()
    if importance == "none":
        return estimate
    sampled = logprobs.detach() if importance == "score" else old_logprobs
    own = ratio is None or importance == "score"
    weight = log_ratio(logprobs, sampled, LARGEST_EXPONENT).exp() if own else ratio
    if limit:
        weight = weight.where(d.detach().abs() < limit, weight.detach())
    weighted = estimate * weight
    return weighted.clip(-clamp, clamp) if clamp else weighted
