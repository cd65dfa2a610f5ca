"""Advantages from rewards and groups, on NumPy: what a sample was worth beside others of its task."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Scale = Literal["group", "batch", "none"]


def group_mean(
    rewards: NDArray[Any],
    group: NDArray[Any],
    *,
    scale: Scale = "group",
    unbiased: bool = True,
    epsilon: float = 1e-4,
    leave_one_out: bool = False,
) -> NDArray[np.float32]:
    """Centre rewards in their group, and scale them. rewards [B], group [B] -> [B] float32, computed in float64.

        advantage = (reward - mean of the group) / (standard deviation + epsilon)

    `scale` says of what the deviation is: of the sample's `group` (Shao et al. 2024, arXiv:2402.03300, section
    4.1), of all rewards of the `batch` (Liu et al. 2025, arXiv:2508.08221), or of nothing (`none`; Liu et al.
    2025, "Dr. GRPO", arXiv:2503.20783). `unbiased` divides by n - 1 rather than n. `leave_one_out` takes the mean
    of the other samples as baseline (RLOO; Ahmadian et al. 2024, arXiv:2402.14740).

    The defaults are those of TRL; verl has epsilon 1e-6. A group of one, and a group whose rewards are all equal,
    get exactly 0, so that nobody computes a gradient from rounding errors.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 1 or rewards.shape != np.shape(group):
        raise ValueError(f"rewards and group must be [B] alike, found {rewards.shape} and {np.shape(group)}")
    if not len(rewards):
        return np.zeros(0, np.float32)
    _, owner = np.unique(group, return_inverse=True)
    size = np.bincount(owner)
    centred = rewards - (np.bincount(owner, rewards) / size)[owner]
    lowest, highest = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(lowest, owner, rewards)
    np.maximum.at(highest, owner, rewards)
    centred[(lowest == highest)[owner]] = 0.0
    advantages = centred * (size / np.maximum(size - 1, 1))[owner] if leave_one_out else centred
    if scale == "group":
        squares = np.bincount(owner, centred**2)
        advantages = _divide(advantages, np.sqrt(squares / np.maximum(size - unbiased, 1))[owner] + epsilon)
    elif scale == "batch":
        deviation = rewards.std(ddof=1 if unbiased else 0) if len(rewards) > 1 else 0.0
        advantages = _divide(advantages, np.full(len(rewards), deviation + epsilon))
    return advantages.astype(np.float32)


def _divide(values: NDArray[Any], by: NDArray[Any]) -> NDArray[Any]:
    """Divide; where equal rewards meet an epsilon of 0, nothing by nothing is 0."""
    quotient: NDArray[Any] = np.divide(values, by, out=np.zeros_like(values), where=by > 0)
    return quotient
