"""The gap between the engine that sampled and the trainer: importance weights, masks and a guard. On NumPy.

Both hold the same weights and still round differently; with stale weights they differ for real. With

    k = exp(trainer's logprob - sampler's logprob)                        of a token
    K = exp(sum over a sequence of trainer's - sampler's)                 of a sequence
    G = exp(mean over a sequence of trainer's - sampler's)                the same, whatever its length

the field multiplies a token's loss by a truncated weight (TIS: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), or takes it out (IcePop: Ling Team 2025, arXiv:2510.18855, section 3.2), or takes
its sequence out (Liu et al. 2025, "When speed kills stability"). What is clamped to plus or minus 20 is the exponent of
k, K or G: sums and means are taken of log-ratios as they are. Divergences (k2, k3) are of clamped log-ratios of tokens.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whet.ops.kl import MAX_LOG_RATIO, MOST_NATS, kl_estimate, log_ratio
from whet.ops.reductions import segment_mean, segment_sum

Level = Literal["none", "token", "sequence"]
Mask = Literal["none", "token", "sequence", "product", "worst"]
Measure = Literal["ratio", "k2", "k3"]
_LARGEST = 600.0
"""The largest exponent whose exponential, summed over many tokens, is a number of float64."""


def gap(trainer: NDArray[Any], sampler: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    """Return trainer's - sampler's logprobs in nats, 0 where the mask is false. All [N] -> [N] float32.

    They are clamped to `MOST_NATS` alone, so that a token that only one of the two can produce stays a number.
    """
    found: NDArray[Any] = np.where(mask, log_ratio(trainer, sampler, MOST_NATS), np.float32(0))
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
    gaps: NDArray[Any],
    lengths: NDArray[Any],
    mask: NDArray[Any],
    level: Mask,
    low: float,
    high: float,
    measure: Measure = "ratio",
) -> NDArray[Any]:
    """Say what may stay: k, for `sequence` G, for `product` K, in [low, high]. -> bool, [N] by token, else [B].

    G is NeMo RL's, K that of TRL. For `worst` it is each of the sequence's k. With the `measure` k2 or k3 it is that
    estimate of KL(sampler || trainer) of a token, for `sequence` its mean, for `product` its sum, for `worst` the
    largest, that must be at most `high`: verl's `token_k3`, `seq_mean_k3`, `seq_sum_k3` and `seq_max_k3`.
    """
    if level == "none":
        return np.ones(len(lengths), np.bool_)
    bounded = gaps.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = gaps if measure == "ratio" else np.where(mask, kl_estimate(-bounded, measure), np.float32(0))
    if level == "sequence":
        size = segment_mean(size, lengths, mask)
    elif level == "product":
        size = segment_sum(size, lengths)
    if measure == "ratio":
        size = np.exp(size.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    stays = (size <= high) & (measure != "ratio" or size >= low)
    if level == "worst":
        stays = segment_sum((mask & ~stays).astype(np.int64), lengths) == 0
    return np.asarray(stays)


def normalised(weights: NDArray[Any], lengths: NDArray[Any], mask: NDArray[Any], level: Level) -> NDArray[Any]:
    """Divide weights, [N] or [B], by their mean over tokens or, of the level `sequence`, over sequences. verl's
    `rollout_is_batch_normalize`. Weights whose mean is 0 stay as they are.
    """
    trained = segment_sum(mask.astype(np.int64), lengths)
    if len(weights) == len(lengths):
        counted = (trained > 0) * (1.0 if level == "sequence" else trained)
    else:
        counted = mask * (np.repeat(1.0 / np.maximum(trained, 1), lengths) if level == "sequence" else 1.0)
    total = float(counted.sum())
    mean = float((weights * counted).sum()) / total if total else 0.0
    return np.asarray(weights / mean, np.float32) if mean > 1e-8 else weights


def trusted(
    gaps: NDArray[Any],
    lengths: NDArray[Any],
    mask: NDArray[Any],
    max_token: float = 0.0,
    max_mean: float = 0.0,
    max_mean_error: float = 0.0,
) -> NDArray[Any]:
    """Say which sequences [B] have no token whose gap is wider than `max_token`, and no wider mean than `max_mean`.

    Both in nats, without sign; 0: no bound. A veto of tokens with a ratio below 1e-4 is a `max_token` of 9.2.
    `max_mean_error` bounds the mean of the exponential of the gap without its sign, which a single token can drive:
    NeMo RL's `seq_logprob_error_threshold`.
    """
    size = np.abs(gaps).astype(np.float64)
    keep = np.ones(len(lengths), np.bool_)
    if max_token:
        keep &= segment_sum((size > max_token).astype(np.int64), lengths) == 0
    if max_mean:
        keep &= segment_mean(size, lengths, mask) <= max_mean
    if max_mean_error:
        keep &= segment_mean(np.exp(size.clip(max=_LARGEST)), lengths, mask) <= max_mean_error
    return keep
