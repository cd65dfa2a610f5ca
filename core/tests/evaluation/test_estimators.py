import math
import random
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from whet.evaluation.estimators import Estimate, estimate, majority_at, pass_at, t_quantile

Sample = tuple[str | None, bool]


def passes_in_subsets(k: int, samples: int, passes: int) -> Fraction:
    """The definition: the share of subsets of k that hold a pass."""
    found = [any(i < passes for i in subset) for subset in combinations(range(samples), k)]
    return Fraction(sum(found), len(found))


def votes_in_subsets(k: int, samples: list[Sample]) -> float:
    """The definition: the mean over subsets of k of what the most common answer is worth, ties shared out."""
    worth = []
    for subset in combinations(samples, k):
        answers = [answer for answer, _ in subset if answer is not None]
        most = max((answers.count(answer) for answer in answers), default=0)
        winners = sorted({answer for answer in answers if answers.count(answer) == most})
        shares = [np.mean([passed for answer, passed in subset if answer == winner]) for winner in winners]
        worth.append(float(np.mean(shares)) if shares else 0.0)
    return math.fsum(worth) / len(worth)


def counted(samples: list[Sample]) -> tuple[list[tuple[int, int]], int]:
    answers = sorted({answer for answer, _ in samples if answer is not None})
    of = [[passed for given, passed in samples if given == answer] for answer in answers]
    return [(len(one), sum(one)) for one in of], sum(answer is None for answer, _ in samples)


def bounds(found: Estimate) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples):
    for passes in range(samples + 1):
        for k in range(1, samples + 1):
            wanted = float(passes_in_subsets(k, samples, passes))
            assert pass_at(k, samples, passes) == pytest.approx(wanted, abs=1e-15)


def test_pass_at_k_of_numbers_worked_by_hand():
    assert pass_at(1, 10, 3) == pytest.approx(0.3)
    assert pass_at(2, 4, 1) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2)
    assert pass_at(5, 10, 2) == pytest.approx(1 - 56 / 252)
    assert pass_at(7, 7, 0) == 0.0
    assert pass_at(7, 7, 1) == 1.0


def test_pass_at_k_does_not_overflow_where_binomial_coefficients_would():
    exact = 1 - Fraction(math.comb(99_000, 500), math.comb(100_000, 500))
    assert pass_at(500, 100_000, 1000) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_is_unbiased():
    """The mean of the estimate over all outcomes of n samples is 1 - (1 - p)^k."""
    p, n, k = 0.23, 9, 4
    outcomes = [math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at(k, n, c) for c in range(n + 1)]
    assert math.fsum(outcomes) == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


@pytest.mark.parametrize(("k", "samples", "passes"), [(0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1), (1, 0, 0)])
def test_pass_at_k_refuses_what_it_is_not_defined_for(k, samples, passes):
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        pass_at(k, samples, passes)


@pytest.mark.parametrize("seed", range(60))
def test_majority_at_k_is_the_mean_over_subsets(seed):
    draw = random.Random(seed)
    samples = [(draw.choice(["a", "b", "c", "d", None]), draw.random() < 0.5) for _ in range(draw.randint(1, 9))]
    answers, abstained = counted(samples)
    for k in range(1, len(samples) + 1):
        assert majority_at(k, answers, abstained) == pytest.approx(votes_in_subsets(k, samples), abs=1e-12)


def test_a_vote_of_all_is_the_majority_and_a_tie_is_shared_out():
    assert majority_at(5, [(3, 3), (2, 0)]) == 1.0
    assert majority_at(5, [(2, 2), (3, 0)]) == 0.0
    assert majority_at(4, [(2, 2), (2, 0)]) == 0.5
    assert majority_at(6, [(2, 2), (2, 0), (2, 0)]) == pytest.approx(1 / 3)
    assert majority_at(4, [(1, 1)], abstained=3) == 1.0  # who gives no answer has no vote
    assert majority_at(3, [], abstained=3) == 0.0


def test_a_vote_of_one_is_the_share_that_passes():
    assert majority_at(1, [(3, 3), (5, 0)], abstained=2) == pytest.approx(0.3)


def test_a_vote_does_not_depend_on_the_order_of_answers():
    answers = [(4, 4), (3, 0), (3, 0), (1, 0)]
    assert len({majority_at(5, [answers[i] for i in order]) for order in ((0, 1, 2, 3), (3, 1, 0, 2))}) == 1


def test_votes_of_many_samples_agree_with_a_simulation_and_keep_their_precision():
    answers, draw = [(100, 100), (90, 0), (40, 0)], np.random.default_rng(0)
    votes = draw.multivariate_hypergeometric([100, 90, 40, 26], 64, size=20_000)[:, :3]
    most = votes.max(axis=1, keepdims=True)
    share = ((votes == most)[:, 0] / (votes == most).sum(axis=1)).mean()
    assert majority_at(64, answers, 26) == pytest.approx(share, abs=0.015)
    sure = [(size, size) for size, _ in answers]
    assert majority_at(64, sure, 26) == 1.0


def test_t_quantiles_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 30: 2.04227, 60: 2.00030, 120: 1.97993}
    for degrees, wanted in table.items():
        assert t_quantile(degrees) == pytest.approx(wanted, abs=6e-6 if degrees > 1 else 6e-5)
    assert t_quantile(200) == pytest.approx(t_quantile(201), abs=1e-4)
    assert t_quantile(10**7) == pytest.approx(1.959964, abs=1e-6)
    assert t_quantile(10, 0.99) == pytest.approx(3.16927, abs=6e-6)


def test_an_interval_on_any_scale_is_students():
    values = [3.0, 5.0, 4.0, 8.0, 5.0]
    found = estimate(values)
    error = math.sqrt(3.5 / 5)  # the squared deviations from 5 add up to 14, over 4
    assert (found.value, found.tasks) == (5.0, 5)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx((5 - 2.776445 * error, 5 + 2.776445 * error))


@pytest.mark.parametrize(
    ("passes", "tasks", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_single_samples_is_wilsons(passes, tasks, low, high):
    found = estimate([1.0] * passes + [0.0] * (tasks - passes), share_of=tasks)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_repeating_an_outcome_does_not_make_the_interval_narrower():
    """Samples that agree with each other say nothing that one of them did not say."""
    tasks = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert estimate(tasks, share_of=50) == estimate(tasks, share_of=5)


def test_samples_that_are_independent_make_it_narrower_but_never_beyond_their_number():
    low, high = bounds(estimate([0.5] * 20, share_of=80))
    assert high - low > 2 * 1.9 * math.sqrt(0.25 / 80)
    assert bounds(estimate([0.0, 1.0] * 10, share_of=20))[0] < low


@pytest.mark.parametrize("share_of", [None, 12])
@pytest.mark.parametrize("values", [[0.0] * 3, [1.0] * 3, [0.5] * 3, [0.0, 1.0, 1.0], [1 / 3, 2 / 3, 1.0]])
def test_no_interval_is_nan_or_outside_or_beside_its_mean(values, share_of):
    found = estimate(values, share_of)
    low, high = bounds(found)
    assert low <= found.value <= high
    if share_of:
        assert 0.0 <= low < high <= 1.0


def test_a_single_task_has_no_interval():
    assert estimate([0.75], share_of=4) == Estimate(0.75, None, None, None, 1)
    assert estimate([3.5]) == Estimate(3.5, None, None, None, 1)


@pytest.mark.parametrize("values", [[], [[1.0]]])
def test_an_estimate_needs_a_value_for_each_task(values):
    with pytest.raises(ValueError, match="a value for each"):
        estimate(values)


def test_order_of_tasks_does_not_matter():
    values = [0.25, 1.0, 0.5, 0.0, 0.75]
    assert estimate(values, share_of=20) == estimate(values[::-1], share_of=20)
    assert estimate(values) == estimate(values[::-1])


def coverage(tasks: int, samples: int, alpha: float, beta: float, k: int = 1, *, share: bool = True) -> float:
    """How often the interval of pass@k holds its true mean, where tasks have chances drawn from a beta distribution."""
    rounds = 800
    draw = np.random.default_rng(7)
    fails = math.prod((beta + i) / (alpha + beta + i) for i in range(k))
    held = 0
    for _ in range(rounds):
        passes = draw.binomial(samples, draw.beta(alpha, beta, tasks))
        found = estimate([pass_at(k, samples, int(c)) for c in passes], tasks * samples / k if share else None)
        low, high = bounds(found)
        held += low <= 1 - fails <= high
    return held / rounds


@pytest.mark.parametrize(
    ("tasks", "samples", "alpha", "beta", "k"),
    [(60, 1, 2, 2, 1), (60, 4, 2, 2, 1), (60, 8, 2, 2, 4), (20, 4, 2, 2, 1), (20, 4, 0.3, 0.3, 1), (100, 4, 8, 0.5, 1)],
)
def test_the_interval_of_a_share_holds_the_truth_as_often_as_it_says(tasks, samples, alpha, beta, k):
    assert 0.925 < coverage(tasks, samples, alpha, beta, k) <= 0.98


def test_where_nearly_everything_passes_the_interval_still_holds_the_truth():
    """A task fails with probability 1 / 31. Student's interval has no width where all 20 pass, so it often misses."""
    assert coverage(20, 1, 30, 1) > 0.93
    assert coverage(20, 1, 30, 1, share=False) < 0.6


def test_rare_tasks_that_always_fail_and_are_missing_do_not_make_it_certain():
    """5 % of the tasks are impossible, and the others pass 97 %. 10 or 30 tasks often have none of the former."""
    for tasks in (10, 30):
        draw, held = np.random.default_rng(1), 0
        for _ in range(400):
            passes = draw.binomial(16, np.where(draw.random(tasks) < 0.05, 0, 0.97))
            low, high = bounds(estimate([int(c) / 16 for c in passes], tasks * 16))
            held += low <= 0.95 * 0.97 <= high
        assert held / 400 > 0.94


def test_subsets_of_k_episodes_are_no_more_trials_than_fit_beside_each_other():
    draw, held = np.random.default_rng(2), 0
    truth = 1 - 0.75**8
    for _ in range(400):
        low, high = bounds(estimate([pass_at(8, 16, int(c)) for c in draw.binomial(16, 0.25, 10)], 10 * 16 / 8))
        held += low <= truth <= high
    assert held / 400 > 0.94


def test_a_single_failure_widens_the_interval():
    whole, less = (bounds(estimate([1.0] * 9 + [last], share_of=160)) for last in (1.0, 15 / 16))
    assert less[0] < whole[0]


def test_students_interval_of_few_tasks_holds_the_truth_as_often_as_it_says():
    draw = np.random.default_rng(3)
    found = [bounds(estimate(draw.normal(2.0, 3.0, 6))) for _ in range(2000)]
    held = np.mean([low <= 2.0 <= high for low, high in found])
    assert 0.935 < held < 0.965
