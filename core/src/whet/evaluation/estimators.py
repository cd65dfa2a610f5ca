"""Estimates of a model's quality from the samples of each task. Pure functions on NumPy.

    samples of a task -> pass@k, maj@k of the task -> mean over tasks -> interval of the mean

The task is the unit everywhere: samples of one task are not independent of each other, tasks are.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

NORMAL_95 = 1.959963984540054
"""Half-width of the central 95 % of a normal distribution, in standard deviations."""


@frozen
class Estimate:
    """A mean over tasks, and its 95 % interval. A single task has no interval, because other tasks may differ."""

    value: float
    low: float | None
    high: float | None
    standard_error: float | None
    """Standard error of the mean over tasks: their unbiased standard deviation / sqrt(tasks)."""
    tasks: int


def pass_at(k: int, samples: int, passes: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k samples passes, from `passes` of `samples`.

        pass@k = 1 - C(samples - passes, k) / C(samples, k)

    Chen et al. 2021, section 2.1 (arXiv:2107.03374), as the product of its figure 3, which neither overflows nor
    cancels. It is the mean over all subsets of k samples. Raises `ValueError` unless 1 <= k <= samples.
    """
    _check(k, samples, passes)
    if samples - passes < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - passes + 1, samples + 1)))


def majority_at(k: int, answers: Sequence[tuple[int, int]], abstained: int = 0) -> float:
    """Return the probability that the most frequent answer of k samples passes: the exact mean over all subsets of k.

    `answers` holds (samples, passes) for each different answer; `abstained` samples have no answer and no vote. A tie
    is broken by a fair draw among the tied answers, whose mean is taken. If samples of one answer were graded
    differently, a fair draw among them decides. If no sample has an answer, nothing passes. With k all samples this is
    the majority vote of self-consistency, Wang et al. 2023 (arXiv:2203.11171).

    Raises `ValueError` unless 1 <= k <= all samples.
    """
    for size, passes in answers:
        _check(1, size, passes)
    samples = sum(size for size, _ in answers) + abstained
    _check(k, samples, 0)
    if k == samples:
        return _vote(answers)
    return _subset_vote(k, tuple(sorted(answers)), abstained)


def _check(k: int, samples: int, passes: int) -> None:
    if not 1 <= k <= samples or not 0 <= passes <= samples:
        raise ValueError(f"wanted 1 <= k <= samples and 0 <= passes <= samples, found {k=}, {samples=}, {passes=}")


def _vote(answers: Sequence[tuple[int, int]]) -> float:
    most = max((size for size, _ in answers), default=0)
    winners = [passes / size for size, passes in answers if size == most]
    return sum(winners) / len(winners) if winners else 0.0


@lru_cache(maxsize=4096)
def _subset_vote(k: int, answers: tuple[tuple[int, int], ...], abstained: int) -> float:
    """Sum over m, the number of winning votes, the probability that exactly t answers have m votes and none has more.

    Each sample is drawn with probability k / samples, so every count is a binomial probability. The part with k draws
    in all is divided by the probability of k draws. The result is the mean over subsets, without a number that could
    overflow.
    """
    samples = sum(size for size, _ in answers) + abstained
    chance, mean = k / samples, 0.0
    for m in range(1, min(k, max((size for size, _ in answers), default=0)) + 1):
        # Answers with fewer samples than m cannot win or tie.
        free = abstained + sum(size for size, _ in answers if size < m)
        rivals = [(size, passes) for size, passes in answers if size >= m]
        ties = min(len(rivals), k // m)
        count = np.zeros((ties + 1, k + 1))  # [tied answers, draws]
        count[0, : free + 1] = binomial(free, chance)[: k + 1]
        worth = np.zeros_like(count)  # the same, times the worth of the tied answers together
        for size, passes in rivals:
            votes = binomial(size, chance)
            fewer, tying = votes[:m], np.append(np.zeros(m), votes[m])
            tied, tied_worth = _with(tying, count), _with(tying, worth + passes / size * count)
            count, worth = _with(fewer, count), _with(fewer, worth)
            count[1:] += tied[:-1]
            worth[1:] += tied_worth[:-1]
        mean += float((worth[1:, k] / np.arange(1, ties + 1)).sum())
    # Digits beyond the 12th are rounding, and a vote that surely passes must be exactly 1.
    return round(mean / float(binomial(samples, chance)[k]), 12)


def _with(votes: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counts with another answer, from the probabilities of 0, 1, ... votes for it."""
    return np.stack([np.convolve(row, votes)[: len(row)] for row in count])


@lru_cache(maxsize=4096)
def binomial(trials: int, chance: float) -> NDArray[np.float64]:
    """Return the probabilities of 0 to `trials` successes: [trials + 1]. `chance` is inside (0, 1)."""
    logs = [math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1) for i in range(trials + 1)]
    successes = np.arange(trials + 1)
    found: NDArray[np.float64] = np.exp(
        np.array(logs) + successes * math.log(chance) + (trials - successes) * math.log1p(-chance)
    )
    return found


def estimate(values: ArrayLike, share_of: float | None = None) -> Estimate:
    """Return the mean of one value for each task, [tasks], with its 95 % interval.

    Values on any scale get Student's interval: mean +- t(tasks - 1) s / sqrt(tasks), s the unbiased standard deviation.
    With equally many samples for each task that is the standard error clustered by task of Miller 2024, section 2.2
    (arXiv:2411.00640), times sqrt(tasks / (tasks - 1)).

    `share_of` is the number of trials behind values that are shares or probabilities, between 0 and 1: of episodes, or
    of k episodes each. They get `share_interval`, which stays inside [0, 1] and always has a width.
    """
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"wanted a value for each of at least one task, found the shape {found.shape}")
    found = np.sort(found)  # so that the sum does not depend on the order
    mean, tasks = float(found.mean()), len(found)
    if tasks < 2:
        return Estimate(mean, None, None, None, tasks)
    error = float(found.std(ddof=1)) / math.sqrt(tasks)
    if share_of is None:
        half = t_quantile(tasks - 1) * error
        return Estimate(mean, mean - half, mean + half, error, tasks)
    mean = min(max(mean, 0.0), 1.0)
    return Estimate(mean, *share_interval(mean, float(found.var()), tasks, share_of), error, tasks)


def share_interval(mean: float, variance: float, tasks: int, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, for an effective number n of independent trials.

        v = (tasks * variance + (mean^2 + (1 - mean)^2) / 4) / (tasks + 1/2)
        n = tasks * mean (1 - mean) / v                 `variance` of the tasks' values, divided by their number
        (mean + z^2 / 2n +- z sqrt(mean (1 - mean) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Wilson 1927; with an effective sample size for clusters: Dean and Pagano 2015, "Evaluating confidence interval
    methods for binomial proportions in clustered surveys". If every value is 0 or 1, n is the number of tasks and z is
    normal: Wilson's interval itself. Otherwise the variance is estimated, with half a task more, half of it at 0 and
    half at 1, because rare tasks that always fail may be missing, and z is Student's t(tasks - 1). n is at least the
    number of tasks, and at most that of trials, its value if each trial is as informative as a task of its own.
    """
    spread = mean * (1 - mean)
    plain = variance >= spread * (1 - 1e-12)  # every value is 0 or 1: the variance has its maximum
    estimated = (tasks * variance + (mean**2 + (1 - mean) ** 2) / 4) / (tasks + 0.5)
    n = float(tasks) if plain else max(tasks, min(tasks * spread / estimated, trials))
    z = NORMAL_95 if plain else t_quantile(tasks - 1)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(spread / n + (z / (2 * n)) ** 2) / (1 + z * z / n)
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


@lru_cache(maxsize=4096)
def t_quantile(degrees: int, inside: float = 0.95) -> float:
    """Return t so that a share `inside` of Student's distribution is within +-t.

    By bisection of its exact distribution, Abramowitz and Stegun 1964, 26.7.3 and 26.7.4; beyond 200 degrees of freedom
    by 26.7.5, whose error is below 1e-9 there.
    """
    if degrees > 200:
        x, v = NormalDist().inv_cdf((1 + inside) / 2), degrees
        return (
            x
            + (x**3 + x) / (4 * v)
            + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * v**2)
            + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * v**3)
        )
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, degrees) < inside else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _t_inside(angle: float, degrees: int) -> float:
    """Return the share of Student's distribution within +-sqrt(degrees) tan(angle)."""
    cosine, odd = math.cos(angle), degrees % 2
    term, series = (cosine if odd else 1.0), 0.0
    for i in range(1 + odd, degrees, 2):
        series += term
        term *= cosine * cosine * i / (i + 1)
    within = math.sin(angle) * series
    return (angle + within) * 2 / math.pi if odd else within
