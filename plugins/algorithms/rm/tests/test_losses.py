"""Values, gradients and metrics against the formulas written out once more, in float64 and pair by pair."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.batch import Batch, from_sequences
from whet_rm.config import BradleyTerryConfig
from whet_rm.losses import BradleyTerry
from whet_rm.rm import with_deviations

SCORES = {0: (0.3, -1.2), 1: (2.5, 2.5), 2: (-0.7, 1.9), 3: (4.0, -3.0)}
"""Of each pair: the chosen response's and the rejected one's."""
MARGINS = {0: 1.0, 1: 0.0, 2: 2.5, 3: -0.5}
ORDER = [(1, True), (0, False), (3, False), (2, True), (2, False), (1, False), (0, True), (3, True)]
SETTINGS = {
    "plain": {},
    "margin": {"margin": 0.6},
    "smoothed": {"label_smoothing": 0.2},
    "centred": {"centering": 0.05},
    "everything": {"margin": 1.0, "label_smoothing": 0.1, "centering": 0.01},
}


def batch() -> tuple[Batch, Any]:
    """Return sequences in an order that is not that of the pairs, and values that are wrong at all masked places."""
    rows, values = [], []
    for unit, chosen in ORDER:
        length = 2 + unit + chosen
        mask = np.arange(length) == length - 1
        rows.append({"tokens": np.arange(length), "loss_mask": mask})
        values.append(np.where(mask, SCORES[unit][0 if chosen else 1], 7.0))
    made = from_sequences(rows, prompt_lengths=[1] * len(rows), unit=[unit for unit, _ in ORDER])
    columns = {"chosen": np.array([c for _, c in ORDER]), "margin": np.array([MARGINS[u] for u, _ in ORDER])}
    return made.with_columns(**columns), np.concatenate(values)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def expected(scores: Any, settings: dict[str, float]) -> float:
    smoothing, total = settings.get("label_smoothing", 0.0), 0.0
    for unit, (chosen, rejected) in scores.items():
        ahead = chosen - rejected - settings.get("margin", 0.0) * MARGINS[unit]
        total -= (1 - smoothing) * log_sigmoid(ahead) + smoothing * log_sigmoid(-ahead)
        total += settings.get("centering", 0.0) * (chosen + rejected) ** 2
    return total / len(scores)


def computed(settings: dict[str, float], given: Batch, values: Any) -> tuple[float, Any, dict[str, Any]]:
    loss, torched = BradleyTerry(BradleyTerryConfig(**settings)), given.map(torch.from_numpy)
    leaf = torch.tensor(values, dtype=torch.float32, requires_grad=True)
    result, counts = loss({"values": leaf}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / max(float(counts[name]), 1) for name, term in result.terms.items())
    (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient.numpy(), result.metrics


@pytest.mark.parametrize("name", SETTINGS)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    given, values = batch()
    value, gradient, _ = computed(SETTINGS[name], given, values)
    assert value == pytest.approx(expected(SCORES, SETTINGS[name]), rel=1e-6)
    places = np.cumsum(given["lengths"]) - 1
    assert not np.delete(gradient, places).any()
    for place, (unit, chosen) in zip(places, ORDER, strict=True):
        slopes = []
        for step in (1e-6, -1e-6):
            moved = {**SCORES, unit: tuple(s + step * (chosen is (i == 0)) for i, s in enumerate(SCORES[unit]))}
            slopes.append(expected(moved, SETTINGS[name]))
        assert gradient[place] == pytest.approx((slopes[0] - slopes[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_metrics_are_means_and_deviations_over_pairs_and_a_tie_is_half_right() -> None:
    given, values = batch()
    metrics = with_deviations(computed({}, given, values)[2])
    chosen, rejected = np.array(list(SCORES.values())).T
    assert {name: metric.number() for name, metric in metrics.items()} == pytest.approx(
        {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/chosen_std": chosen.std(),
            "rewards/rejected_std": rejected.std(),
            "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": 2.5 / 4,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(("ties", "accuracy"), [("half", 2.5 / 4), ("wrong", 2 / 4), ("right", 3 / 4)])
def test_a_tie_counts_as_it_is_told_to(ties: Any, accuracy: float) -> None:
    _, _, metrics = computed({"ties": ties}, *batch())
    assert metrics["rewards/accuracies"].number() == accuracy


def test_deviations_do_not_depend_on_micro_batches() -> None:
    from whet.data.metrics import merge

    given, values = batch()
    parts = []
    for unit in SCORES:
        kept = given["unit"] == unit
        parts.append(computed({}, given.where(kept), values[np.repeat(kept, given["lengths"])])[2])
    whole = with_deviations(computed({}, given, values)[2])
    merged = with_deviations(merge(parts))
    assert {n: m.number() for n, m in merged.items()} == pytest.approx({n: m.number() for n, m in whole.items()})


def test_a_pair_with_one_score_counts_nowhere() -> None:
    given, values = batch()
    hidden = given["loss_mask"].copy()
    hidden[np.cumsum(given["lengths"])[ORDER.index((2, False))] - 1] = False
    value, gradient, metrics = computed(SETTINGS["everything"], given.with_columns(loss_mask=hidden), values)
    assert value == pytest.approx(
        expected({u: s for u, s in SCORES.items() if u != 2}, SETTINGS["everything"]), rel=1e-6
    )
    assert np.count_nonzero(gradient) == 6
    assert float(metrics["rewards/margins"].count) == 3


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("score", [-50.0, 50.0])
def test_scores_of_50_stay_finite(name: str, score: float) -> None:
    given, _ = batch()
    far = np.where(np.repeat(given["chosen"], given["lengths"]), score, -score)
    value, gradient, metrics = computed(SETTINGS[name], given, far)
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()
    assert all(math.isfinite(metric.number()) for metric in with_deviations(metrics).values())
