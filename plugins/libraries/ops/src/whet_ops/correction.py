"""The gap between the engine that samples and the trainer: importance weights, masks and a guard. On NumPy.

    k = exp(trainer's logprob - sampler's logprob)                        of a token
    K = exp(sum over a sequence of trainer's - sampler's)                 of a sequence
    G = exp(mean over a sequence of trainer's - sampler's)                of a sequence, independent of its length

Sampler and trainer have the same model weights but round differently. With stale weights, the models differ. There are
three corrections:

- Multiply a token's loss by a truncated weight (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you
  off-policy RL training").
- Remove the token (IcePop: Ling Team 2025, arXiv:2510.18855, section 3.2).
- Remove its sequence (Liu et al. 2025, "When speed kills stability").

The exponent of k, K or G is clamped to plus or minus 20. The log-ratios in a sum or mean are not clamped before.
Divergences (k2, k3) are computed from clamped log-ratios of tokens.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whet_ops.kl import MAX_LOG_RATIO, MOST_NATS, kl_estimate, log_ratio
from whet_ops.reductions import segment_mean, segment_sum

Level = Literal["none", "token", "sequence"]
Mask = Literal["none", "token", "sequence", "product", "worst"]
Measure = Literal["ratio", "k2", "k3"]
_LARGEST = 600.0
"""The largest exponent. Its exponential, summed over many tokens, is finite in float64."""


def gap(trainer: NDArray[Any], sampler: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    """Return the trainer's minus the sampler's logprobs in nats, 0 where the mask is false. All [N] -> [N] float32.

    The gaps are clamped only to `MOST_NATS`. So a gap is finite even if only one of the two can produce the token.
    """
    found: NDArray[Any] = np.where(mask, log_ratio(trainer, sampler, MOST_NATS), np.float32(0))
    return found


def importance_weights(
    gaps: NDArray[Any], lengths: NDArray[Any], level: Level, floor: float = 0.0, cap: float = 2.0
) -> NDArray[Any]:
    """Return the truncated weight clip(k or K, floor, cap). gaps [N], lengths [B] -> [N] by token, [B] by sequence.

    For `sequence`, the weight is the product over the tokens, as in NeMo RL, TRL and verl.
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
    """Return whether the mask keeps each token [N] or each sequence [B]: bool.

        level       result    measure ratio                    measure k2 or k3
        token       [N]       k in [low, high]                 estimate of the token <= high    verl's token_k3
        sequence    [B]       G in [low, high]                 mean over the tokens <= high     verl's seq_mean_k3
        product     [B]       K in [low, high]                 sum over the tokens <= high      verl's seq_sum_k3
        worst       [B]       each k in [low, high]            largest of the tokens <= high    verl's seq_max_k3

    The measures k2 and k3 estimate KL(sampler || trainer). NeMo RL compares G, TRL compares K.
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
    """Return weights [N] or [B] divided by their mean over tokens, or, for the level `sequence`, over sequences.

    This is verl's `rollout_is_batch_normalize`. If the mean is 0, the weights stay unchanged.
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
    """Return whether each sequence [B] has no token gap above `max_token` and no mean gap above `max_mean`.

    Gaps are absolute, in nats. A bound of 0 means no bound. To drop sequences with a token ratio below 1e-4, set
    `max_token` to 9.2. `max_mean_error` bounds the mean of the exponential of the absolute gap, as NeMo RL's
    `seq_logprob_error_threshold`. A single token can dominate this mean.
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
