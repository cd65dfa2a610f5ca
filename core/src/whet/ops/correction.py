"""The gap between the engine that sampled and the trainer: importance weights, masks and a guard. On NumPy.

Both hold the same weights and still round differently; with stale weights they differ for real. With

    k = exp(trainer's logprob - sampler's logprob)                        of a token
    K = exp(sum over a sequence of trainer's - sampler's)                 of a sequence
    G = exp(mean over a sequence of trainer's - sampler's)                the same, whatever its length

the field multiplies a token's loss by a truncated weight (TIS: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), or takes it out (IcePop: Ling Team 2025, arXiv:2510.18855, section 3.2), or takes
its sequence out (Liu et al. 2025, "When speed kills stability"). Log-ratios are clamped to plus or minus 20.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whet.ops.kl import MAX_LOG_RATIO, log_ratio
from whet.ops.reductions import segment_mean, segment_sum

Level = Literal["none", "token", "sequence"]
Mask = Literal["none", "token", "sequence", "product"]


def gap(trainer: NDArray[Any], sampler: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    """Give trainer's - sampler's logprobs in nats, 0 where the mask is false. All [N] -> [N] float32."""
    found: NDArray[Any] = np.where(mask, log_ratio(trainer, sampler), np.float32(0))
    return found


def importance_weights(
    gaps: NDArray[Any], lengths: NDArray[Any], level: Level, floor: float = 0.0, cap: float = 2.0
) -> NDArray[Any]:
    """Give the truncated weight clip(k or K, floor, cap). gaps [N], lengths [B] -> [N] by token, [B] by sequence.

    `sequence` is the product over the tokens, as in NeMo RL, TRL and verl.
    """
    if level == "none":
        return np.ones(len(lengths), np.float32)
    exponent = gaps if level == "token" else segment_sum(gaps, lengths)
    return np.asarray(np.exp(exponent.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clip(floor, cap))


def within(
    gaps: NDArray[Any], lengths: NDArray[Any], mask: NDArray[Any], level: Mask, low: float, high: float
) -> NDArray[Any]:
    """Say what may stay: k, for `sequence` G, for `product` K, in [low, high]. -> bool, [N] by token, else [B].

    G is NeMo RL's, K that of TRL and of verl's `sequence`.
    """
    if level == "none":
        return np.ones(len(lengths), np.bool_)
    if level == "token":
        exponent = gaps
    elif level == "sequence":
        exponent = segment_mean(gaps, lengths, mask)
    else:
        exponent = segment_sum(gaps, lengths).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(exponent)
    return np.asarray((low <= ratio) & (ratio <= high))


def trusted(
    gaps: NDArray[Any], lengths: NDArray[Any], mask: NDArray[Any], max_token: float = 0.0, max_mean: float = 0.0
) -> NDArray[Any]:
    """Say which sequences [B] have no token whose gap is wider than `max_token`, and no wider mean than `max_mean`.

    Both in nats, without sign; 0: no bound. verl's veto of a token with a ratio below 1e-4 is a `max_token` of 9.2.
    """
    size = np.abs(gaps)
    keep = np.ones(len(lengths), np.bool_)
    if max_token:
        keep &= segment_sum((size > max_token).astype(np.int64), lengths) == 0
    if max_mean:
        keep &= segment_mean(size, lengths, mask) <= max_mean
    return keep
