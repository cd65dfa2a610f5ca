"""Estimates of the KL divergence from single samples. NumPy in, NumPy out; torch in, torch out.

Estimates of KL(p || q) from a token x drawn from p, with d = log p(x) - log q(x) (Schulman 2020,
joschu.net/blog/kl-approx):

    k1 = d                       unbiased, large variance, may be negative
    k2 = d**2 / 2                biased, small variance
    k3 = exp(-d) - 1 + d         unbiased, small variance, never negative
    abs = |d|                    not an estimate of a divergence; verl offers it

As a loss, an estimate acts through its *gradient* (Tang & Munos 2025, arXiv:2506.09477). The mean gradient, over x
drawn from p, is:

    k1    0: it regularises nothing
    k2    the gradient of KL(p || q)
    k3    the gradient of KL(q || p)

`penalty_of_kl` has two ways to make the gradient of k1 and k3 the gradient of KL(p || q).
"""

from typing import Any, Literal

import numpy as np

Estimator = Literal["k1", "k2", "k3", "abs"]
Importance = Literal["none", "score", "ratio"]

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, positive or negative. Beyond it, the gradient is 0. exp(20) is 5e8, so nothing overflows."""
LARGEST_EXPONENT = 60.0
"""Bound of a log-ratio in an exponential if the clamp is off. exp(60) is 1e26, and products with other factors stay
finite in float32."""
MOST_NATS = 1.0e4
"""Bound of log-ratios that are summed or averaged before they are clamped. A token that cannot occur must not make the
sum infinite."""


def log_ratio(logprobs: Any, others: Any, limit: float = MAX_LOG_RATIO) -> Any:
    """Return logprobs - others [N] in float32, clamped to plus or minus `limit`. Beyond the limit, the gradient is 0.

    Logprobs of -inf are allowed. If one of the two is -inf, the result is the limit; if both are, it is 0. A `limit` of
    0 means no clamp. If the caller sums or averages the result before a final clamp, use `MOST_NATS`.
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

    The estimate is clamped to plus or minus `clamp`. Beyond it, the gradient is 0. A `clamp` of 0 means no bound.
    """
    d = log_ratios
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = d * d / 2
    elif estimator == "abs":
        estimate = abs(d)
    else:
        # For a small d, exp(-d) - 1 + d would only be rounding errors; expm1 avoids them. The exponent is bounded,
        # because the gradient beyond `clamp` would be infinity times 0.
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

    `importance` multiplies the estimate by a weight with a gradient: the policy's probability over the probability of
    the sampling policy.

        none    1: the gradient is that of the estimate alone       GRPO section 4.1.1 (arXiv:2402.03300), TRL, verl
        score   exp(logprobs - logprobs without gradient): the value is unchanged; the gradient gains the part of
                sampling, and is that of KL(policy || reference) on policy     NeMo RL; arXiv:2506.09477
        ratio   exp(logprobs - old_logprobs): the same, off policy        DeepSeek-V3.2 section 3.1
                                    (arXiv:2512.02556), TRL's use_bias_correction_kl, NeMo RL's on-policy approximation

    `ratio` [N], with gradient, replaces exp(logprobs - old_logprobs), e.g. with the ratio of whole sequences.
    `straight_through` keeps the value and uses the gradient of k2, as verl's `k1+` and `k3+`. `limit` clamps the
    log-ratio of policy and reference (NeMo RL, and verl for k3: 20). `clamp` clamps the estimate times its weight (NeMo
    RL and verl: 10; TRL: neither). The weight itself has no clamp, as in NeMo RL and TRL; it only stays finite in
    float32. Beyond either clamp, neither the estimate nor its weight has a gradient (NeMo RL), except for the gradient
    of k2 of `straight_through`.
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
