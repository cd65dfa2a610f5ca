"""Advantages from rewards and groups, on NumPy: the reward of a sample compared with other samples of its task."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "reward"]
"""The advantage of a sample that is alone in its group: 0, or its reward, as in verl."""
EpsilonAt = Literal["floor", "variance", "deviation"]
"""The use of an epsilon: the smallest variance, added to the variance, or added to the deviation."""


def group_mean(
    rewards: NDArray[Any],
    group: NDArray[Any],
    *,
    scale: Scale = "group",
    unbiased: bool = True,
    epsilon: float = 1e-4,
    leave_one_out: bool = False,
    std_over: Literal["group", "others"] = "group",
    singleton: Singleton = "zero",
    rescale: Literal["none", "unequal", "nonzero"] = "none",
    task_rewards: NDArray[Any] | None = None,
) -> NDArray[np.float32]:
    """Return rewards minus the mean of their group, scaled. rewards, group [B] -> [B] float32, computed in float64.

        advantage = (reward - mean of the group) / (standard deviation + epsilon)

    `scale` chooses the deviation:

        group    of the rewards of the sample's group       Shao et al. 2024, section 4.1 (arXiv:2402.03300)
        batch    of all rewards of the batch                Liu et al. 2025 (arXiv:2508.08221)
        none     no division                                Liu et al. 2025, "Dr. GRPO" (arXiv:2503.20783)

    `unbiased` divides by n - 1 rather than n. With `leave_one_out`, the baseline is the mean of the group's other
    samples (RLOO; Ahmadian et al. 2024, arXiv:2402.14740). With `std_over` `others`, the deviation of a group also
    leaves out the sample itself. If the rewards of the other samples are all equal, the sample is not divided. NeMo RL
    does the same, with epsilon 1e-6.

    `rescale` multiplies the advantages by the number of samples over the number of some of them. `unequal`: samples of
    groups of unequal rewards (GPG; Chu et al. 2025, arXiv:2504.02546), or of unequal `task_rewards` [B], which are the
    rewards without a penalty that each sample pays. `nonzero`: samples of a reward other than 0, as in verl's `gpg`.

    The defaults are those of TRL; verl has epsilon 1e-6. If all rewards of a group are equal, its advantages are
    exactly 0, so that no gradient is computed from rounding errors. The advantage of a group of one is also 0. If
    `singleton` is `reward`, it is the reward, as if the baseline were 0 and the deviation 1 (verl).
    """
    rewards = np.asarray(rewards, np.float64)
    centred, owner, size = _centred(rewards, group)
    if not len(rewards):
        return np.zeros(0, np.float32)
    deviation = rewards.std(ddof=1 if unbiased else 0) if len(rewards) > 1 else 0.0
    advantages = centred * (size / np.maximum(size - 1, 1))[owner] if leave_one_out else centred
    if scale == "group":
        squares = np.bincount(owner, centred**2)
        if std_over == "others":
            of_others = _of_others(rewards, owner, unbiased)
            advantages = _divide(advantages, np.where(of_others > 0, of_others + epsilon, 1.0))
        else:
            advantages = _divide(advantages, np.sqrt(squares / np.maximum(size - unbiased, 1))[owner] + epsilon)
    elif scale == "batch":
        advantages = _divide(advantages, np.full(len(rewards), deviation + epsilon))
    if singleton == "reward":
        by = {"none": 1.0, "group": 1.0 + epsilon}.get(scale, deviation + epsilon)
        single = (size == 1)[owner]
        advantages[single] = rewards[single] / by if by else 0.0
    if rescale != "none":
        compared = advantages if task_rewards is None else less_group_mean(task_rewards, group, singleton)
        teaching = (np.bincount(owner, compared != 0) > 0)[owner]
        counted = int(np.count_nonzero(rewards if rescale == "nonzero" else teaching))
        advantages = advantages * (len(rewards) / max(counted, 1))
    return advantages.astype(np.float32)


def less_group_mean(rewards: NDArray[Any], group: NDArray[Any], singleton: Singleton = "zero") -> NDArray[np.float64]:
    """Return rewards minus the mean of their group. rewards [B], group [B] -> [B] float64.

    If all rewards of a group are equal, the result is exactly 0. For a group of one it is 0, unless `singleton` is
    `reward`.
    """
    rewards = np.asarray(rewards, np.float64)
    centred, owner, size = _centred(rewards, group)
    return np.where((size == 1)[owner], rewards, centred) if singleton == "reward" and len(rewards) else centred


def length_weighted(
    rewards: NDArray[Any], group: NDArray[Any], sizes: NDArray[Any], singleton: Singleton = "zero"
) -> NDArray[np.float32]:
    """Return rewards minus the length-weighted mean of their group. rewards, group, sizes [B] -> [B] float32.

        advantage = reward - sum over the group of size * reward / sum over the group of size

    OPO: Hao et al. 2025 (arXiv:2505.23585). This baseline has the least variance, if the squared norm of a response's
    gradient is proportional to its length. `sizes` are in tokens. A group without any tokens has the unweighted mean.
    The advantages are not divided by a deviation. They are computed in float64. If all rewards of a group are equal,
    its advantages are exactly 0. The advantage of a group of one is 0, or its reward if `singleton` is `reward`, as in
    verl.
    """
    rewards, sizes = np.asarray(rewards, np.float64), np.asarray(sizes, np.float64)
    centred, owner, size = _centred(rewards, group)
    if not len(rewards):
        return np.zeros(0, np.float32)
    total = np.bincount(owner, sizes)
    # The weighted mean of the centred rewards, rather than of the rewards: equal rewards leave exactly 0.
    beyond = np.divide(np.bincount(owner, sizes * centred), total, out=np.zeros(len(total)), where=total > 0)
    advantages = centred - beyond[owner]
    if singleton == "reward":
        advantages = np.where((size == 1)[owner], rewards, advantages)
    return np.asarray(advantages, np.float32)


def pass_at_k(
    rewards: NDArray[Any],
    group: NDArray[Any],
    k: int | None = None,
    *,
    baseline: Literal["leave-one-out", "mean"] = "leave-one-out",
    scale: Literal["group", "none"] = "group",
    epsilon: float = 1e-6,
) -> NDArray[np.float32]:
    """Return what a sample adds to the best reward of k samples. rewards, group [B] -> [B] float32, from float64.

        leave-one-out   mean, over the subsets S of k samples with this sample, of (best of S - best of the others in S)
        mean            mean of the best of S over these subsets - mean of the best of S over all subsets of k samples

    The means are exact, for any rewards. `k` None, or more samples than a group has: all samples of the group.

    With `leave-one-out` and all samples, only the best sample has an advantage, its reward minus the second best: Tang
    et al. 2025 (arXiv:2503.19595), verl's `grpo_passk`. With fewer samples it is Walder & Karkhanis 2025
    (arXiv:2505.15201). `mean` is Chen et al. 2025 (arXiv:2508.10751), who derive it for rewards of 0 and 1. With all
    samples, its advantages are 0, because there is one subset.

    `scale` `group` divides by a deviation plus `epsilon`. With `leave-one-out` it is that of the group's rewards, with
    n - 1 (verl); with `mean` that of the best reward over all subsets (Chen et al., without an epsilon). If all rewards
    of a group are equal, or the group has one sample, its advantages are exactly 0.
    """
    centred, owner, size = _centred(np.asarray(rewards, np.float64), group)
    if not len(centred):
        return np.zeros(0, np.float32)
    advantages = np.zeros(len(centred))
    for members in np.split(np.argsort(owner, kind="stable"), np.cumsum(size)[:-1]):
        members, n = members[np.argsort(centred[members], kind="stable")], len(members)
        chosen, values, below = min(k or n, n), centred[members], np.arange(n)
        # Sums over the gaps between neighbours rather than over rewards: equal rewards have exactly equal advantages.
        gaps, down = np.diff(values), below[:0:-1]
        # [n], the probability that the k - 1 others of a subset are all among 0, 1, ..., n - 1 of the n - 1 others.
        among = np.append(np.cumprod(np.maximum(down - chosen + 1, 0) / down)[::-1], 1.0)
        if baseline == "leave-one-out":
            found = np.append(0.0, np.cumsum(gaps * among[1:]))
            deviation = values.std(ddof=1) if n > 1 else 0.0
        else:
            beyond = np.append(np.cumsum((gaps * among[:-1])[::-1])[::-1], 0.0)
            found = beyond.mean() - beyond
            best = among * chosen / n  # [n], the probability that the best of a subset is this sample
            deviation = np.sqrt((best * (values - (best * values).sum()) ** 2).sum())
        advantages[members] = _divide(found, np.full(n, deviation + epsilon)) if scale == "group" else found
    return advantages.astype(np.float32)


def _centred(rewards: NDArray[Any], group: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return rewards minus the mean of their group [B], the index of the group of each [B], and the group sizes [G].

    If all rewards of a group are equal, the differences are exactly 0.
    """
    if rewards.ndim != 1 or rewards.shape != np.shape(group):
        raise ValueError(f"rewards and group must be [B] alike, found {rewards.shape} and {np.shape(group)}")
    _, owner = np.unique(group, return_inverse=True)
    size = np.bincount(owner)
    centred = rewards - (np.bincount(owner, rewards) / size)[owner]
    lowest, highest = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(lowest, owner, rewards)
    np.maximum.at(highest, owner, rewards)
    centred[(lowest == highest)[owner]] = 0.0
    return centred, owner, size


def _of_others(rewards: NDArray[Any], owner: NDArray[Any], unbiased: bool) -> NDArray[np.float64]:
    """Return, for each sample, the deviation of the group's other samples, and 0 if they are equal: [B].

    rewards [B], the index of the group of each [B].
    """
    found = np.zeros(len(rewards))
    for members in np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1]):
        number = len(members)
        if number > 2:  # with fewer, the other sample is equal to itself
            every = np.broadcast_to(rewards[members], (number, number))
            others = every[~np.eye(number, dtype=bool)].reshape(number, number - 1)
            # A deviation of equal numbers is a rounding error, and must not be a divisor.
            equal = others.max(1) - others.min(1) <= 1e-12 * np.abs(others).max(1)
            found[members] = np.where(equal, 0.0, others.std(1, ddof=int(unbiased)))
    return found


def whiten(
    values: NDArray[Any],
    weights: NDArray[Any],
    *,
    centre: bool = True,
    unbiased: bool = False,
    epsilon: float = 1e-8,
    epsilon_at: EpsilonAt = "floor",
) -> NDArray[Any]:
    """Return values scaled to mean 0 and deviation 1 over the batch. values [M], weights [M] >= 0 -> [M] float64.

        floor       (values - mean) / sqrt(max(variance, epsilon))       OpenRLHF, NeMo RL's REINFORCE++
        variance    (values - mean) / sqrt(variance + epsilon)           verl, TRL's PPO, NeMo RL's PPO
        deviation   (values - mean) / (sqrt(variance) + epsilon)         TRL's RLOO and GDPO

    `unbiased` multiplies the variance by n / (n - 1), where n is the sum of the weights. verl and TRL do so; OpenRLHF
    and NeMo RL's REINFORCE++ do not. If all values are equal, or there is only one, the result is exactly 0.
    `centre=False` only divides.
    """
    total, seen = float(weights.sum()), values[weights > 0].astype(np.float64)
    if total <= 0 or seen.min() == seen.max():
        return np.zeros(len(values))
    # Values are divided by the largest value, so that the squares of large values stay finite and the squares of small
    # values do not become 0.
    unit = max(float(np.abs(seen).max()), 1e-150)
    scaled = values.astype(np.float64) / unit
    average = float((scaled * weights).sum()) / total
    variance = float(((scaled - average) ** 2 * weights).sum()) / total
    if unbiased and total > 1:
        variance *= total / (total - 1)
    own, least = np.sqrt(variance) * unit, np.sqrt(epsilon)
    # hypot is the square root of the sum of squares. It stays finite even if the squares do not.
    spread = {"floor": max(own, least), "variance": np.hypot(own, least), "deviation": own + epsilon}
    deviation = spread[epsilon_at] / unit
    return np.asarray((scaled - average * centre) / deviation)


def gdpo(
    rewards: Mapping[str, NDArray[Any]],
    group: NDArray[Any],
    weights: Mapping[str, float | NDArray[Any]],
    *,
    penalty: NDArray[Any] | None = None,
    scale: Scale = "group",
    unbiased: bool = True,
    epsilon: float = 1e-4,
    leave_one_out: bool = False,
    std_over: Literal["group", "others"] = "group",
    singleton: Singleton = "zero",
    tokens: NDArray[Any] | None = None,
    centre: bool = False,
    batch_epsilon: float | None = None,
    epsilon_at: EpsilonAt = "deviation",
) -> NDArray[np.float32]:
    """Normalise each named reward in its group, sum them, scale over the batch. rewards {name: [B]}, group [B] -> [B].

        A_n = (r_n - mean of the group) / (standard deviation in the group + epsilon)        for each name n
        A   = sum over n of weight_n * A_n
        advantage = A / (standard deviation of A in the batch + epsilon)

    GDPO: Liu et al. 2026, section 3.1 (arXiv:2601.05242). A_n is as in `group_mean`. The last line is as in `whiten`,
    with `batch_epsilon` if one is given.

    The paper also subtracts the mean of A in the batch. This mean is 0, because the mean of each group is 0. It is not
    subtracted here, so that a group in which every reward is equal gets exactly 0. The mean is not 0 if each sample is
    weighted by its number of `tokens` [B] (verl), or if the deviation is over the other samples (NeMo RL). For these
    cases, `centre` subtracts the mean.

    A `penalty` [B], already weighted, is added to A after the mean of its group is subtracted. It is not divided by its
    deviation, so that its weight matters.

    A weight is one number, or [B] where samples of several environments weigh a reward differently.

    If a sample has no reward of some name (nan), this name adds 0 to its advantage. Its group is normalised without the
    sample, as in TRL. The defaults are those of TRL. NeMo RL has epsilon 1e-6 within groups and none over the batch.
    """
    combined = np.zeros(len(group))
    for name, weight in weights.items():
        there = ~np.isnan(rewards[name])
        combined[there] += np.broadcast_to(weight, there.shape)[there] * group_mean(
            rewards[name][there], group[there], scale=scale, unbiased=unbiased, epsilon=epsilon,
            leave_one_out=leave_one_out, std_over=std_over, singleton=singleton,
        )  # fmt: skip
    if penalty is not None:
        combined += group_mean(penalty, group, scale="none", leave_one_out=leave_one_out, singleton=singleton)
    return whiten(
        combined, np.ones(len(combined)) if tokens is None else tokens, centre=centre, unbiased=unbiased,
        epsilon=epsilon if batch_epsilon is None else batch_epsilon, epsilon_at=epsilon_at,
    ).astype(np.float32)  # fmt: skip


def _divide(values: NDArray[Any], by: NDArray[Any]) -> NDArray[Any]:
    """Return values / by, and 0 where `by` is 0. `by` is 0 for equal rewards with an epsilon of 0."""
    quotient: NDArray[Any] = np.divide(values, by, out=np.zeros_like(values), where=by > 0)
    return quotient
