"""Generalised advantage estimation on ragged tokens, on NumPy: how much better a token was than the critic expected.

    model tokens of a sequence      a0   a1  [environment]  a2
    values, before each token       V0   V1                 V2   after
    rewards, for each token         r0   r1                 r2

The steps of the chain are the model's tokens. Tokens of the environment are left out. The state after a1 is the state
before a2. The value of this state includes the environment's message. The message adds no discount.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet_ops.reductions import segment_sum


def gae(
    rewards: NDArray[Any],
    values: NDArray[Any],
    mask: NDArray[Any],
    lengths: NDArray[Any],
    *,
    gamma: float = 1.0,
    lambda_: float | NDArray[Any] = 0.95,
    after: NDArray[Any] | None = None,
) -> NDArray[np.float64]:
    """Estimate advantages. rewards, values, mask [N], lengths [B] -> [N] float64, 0 where the mask is false.

        delta_t = r_t + gamma V_next - V_t
        A_t     = delta_t + gamma lambda A_next

    Schulman et al. 2015, equation 16 (arXiv:1506.02438). `next` is the next token of the sequence under the mask. After
    the last token, A is 0 and V is `after` [B]. The default of `after` is 0: the episode is over. `lambda_` is one
    number or [B]. Rewards and values where the mask is false are not read.

    The returns that a critic learns are A + V. They may use another lambda: Yuan et al. 2025, "VC-PPO", decoupled GAE
    (arXiv:2503.01491).
    """
    mask, lengths = np.asarray(mask, np.bool_), np.asarray(lengths, np.int64)
    if not (np.shape(rewards) == np.shape(values) == mask.shape == (lengths.sum(),)):
        raise ValueError(
            f"wanted rewards, values and mask [N] of {lengths.sum()} tokens, found {np.shape(rewards)}, "
            f"{np.shape(values)} and {mask.shape}"
        )
    sizes = segment_sum(mask.astype(np.int64), lengths)
    ends = np.cumsum(sizes)
    expected = np.asarray(values, np.float64)[mask]
    following = np.append(expected, 0.0)[1:]
    some = sizes > 0
    following[ends[some] - 1] = 0.0 if after is None else np.asarray(after, np.float64)[some]
    deltas = np.asarray(rewards, np.float64)[mask] + gamma * following - expected
    advantages = np.zeros(len(mask))
    advantages[mask] = _discounted(deltas, sizes, ends, gamma * np.broadcast_to(lambda_, lengths.shape))
    return advantages


def _discounted(
    deltas: NDArray[Any], sizes: NDArray[Any], ends: NDArray[Any], decay: NDArray[Any]
) -> NDArray[np.float64]:
    """Return, for each token, the decayed sum of its delta and all later deltas. deltas [M]; others [B] -> [M].

    All sequences are processed in parallel, from the last token to the first. They are sorted by length, so that the
    short sequences end first.
    """
    order = np.argsort(-sizes, kind="stable")
    sizes, ends, decay = sizes[order], ends[order], decay[order]
    found, running = np.zeros(len(deltas)), np.zeros(len(sizes))
    longest = int(sizes[0]) if len(sizes) else 0
    left = np.searchsorted(-sizes, -np.arange(1, longest + 1), side="right")
    for back, count in enumerate(left, 1):
        at = ends[:count] - back
        running[:count] = deltas[at] + decay[:count] * running[:count]
        found[at] = running[:count]
    return found


def adaptive_lambda(sizes: NDArray[Any], alpha: float) -> NDArray[np.float64]:
    """Return a lambda for each sequence from its number of model tokens. sizes [B] -> [B].

        lambda = max(0, 1 - 1 / (alpha size))

    Yue et al. 2025, "VAPO", section 4.2 (arXiv:2504.05118), with alpha 0.05. The sum of the powers of lambda is
    proportional to the length. For responses shorter than 1 / alpha, the paper's lambda would be negative; here it is
    0.
    """
    return np.asarray(np.maximum(0.0, 1.0 - 1.0 / np.maximum(alpha * np.asarray(sizes, np.float64), 1e-12)))


def at_last(values: NDArray[Any], mask: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return each sequence's value at its last token under the mask, 0 elsewhere. values [B], mask [N] -> [N].

    The value of a sequence without a token under the mask is left out.
    """
    there = np.flatnonzero(mask)
    owner = np.repeat(np.arange(len(lengths)), lengths)[there]
    last = np.append(owner[1:] != owner[:-1], True) if len(owner) else np.zeros(0, np.bool_)
    placed = np.zeros(len(mask), np.asarray(values).dtype)
    placed[there[last]] = np.asarray(values)[owner[last]]
    return placed


def explained_variance(predicted: NDArray[Any], actual: NDArray[Any]) -> float:
    """Return 1 - Var(actual - predicted) / Var(actual). predicted, actual [M].

    1 is a perfect prediction. 0 is no better than a constant. A negative number means that the prediction adds noise.
    The variances are biased, as in OpenAI Baselines. If all actual numbers are equal, or there are none, the result is
    0.
    """
    if not len(actual) or np.min(actual) == np.max(actual):
        return 0.0
    apart = np.asarray(actual, np.float64) - predicted
    return float(1.0 - apart.var() / np.asarray(actual, np.float64).var())
