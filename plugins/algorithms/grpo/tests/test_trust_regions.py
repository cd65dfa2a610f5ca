"""VESPO, DPPO, Clip-Cov and KL-Cov: values and gradients against their formulas, a token at a time in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.batch import Batch
from whet_grpo import losses
from whet_grpo.config import ClippedPgConfig, DppoConfig, OffPolicySection, VespoConfig
from whet_ops.algorithms.config import CovarianceSection, KlOldSection
from whet_ops.algorithms.policy_steps import treat_covariance
from whet_testing.batches import random_batch

COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs")
Token = tuple[float, float]
"""The loss of a token, and its gradient by the logprob of the token."""
Formula = Callable[[float, float, float, float], Token]
"""Of a token's logprob, its old logprob, its advantage, and the sum of log-ratios of its sequence."""


def vespo(logprob: float, old: float, advantage: float, whole: float) -> Token:
    power, decay = (1.5, 2.5) if advantage >= 0 else (0.5, 0.75)
    ratio = math.exp(whole)
    weight = ratio**power * math.exp(decay * (1 - ratio))
    return -weight * advantage * logprob, -weight * advantage


def binary_tv(new: float, old: float) -> float:
    return abs(new - old)


def binary_kl(new: float, old: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def dppo(distance: Callable[[float, float], float], low: float, high: float, most: float) -> Formula:
    def formula(logprob: float, old: float, advantage: float, whole: float) -> Token:
        new, before = math.exp(logprob), math.exp(old)
        away = distance(new, before)
        if (advantage > 0 and new > before and away > high) or (advantage < 0 and new < before and away > low):
            return 0.0, 0.0
        weight = min(new / before, most)
        return -weight * advantage * logprob, -weight * advantage

    return formula


def unclipped(logprob: float, old: float, advantage: float, whole: float) -> Token:
    ratio = math.exp(logprob - old)
    return -ratio * advantage, -ratio * advantage


CASES: dict[str, tuple[Any, Formula]] = {
    "vespo": (
        losses.Vespo(
            VespoConfig(power_positive=1.5, decay_positive=2.5, power_negative=0.5, decay_negative=0.75)
        ),
        vespo,
    ),
    "dppo by tv": (
        losses.Dppo(DppoConfig(bound_low=0.1, bound_high=0.2, max_weight=1.5)), dppo(binary_tv, 0.1, 0.2, 1.5)
    ),
    "dppo by kl": (
        losses.Dppo(DppoConfig(divergence="kl", bound_low=0.03, bound_high=0.02, max_weight=None)),
        dppo(binary_kl, 0.03, 0.02, math.inf),
    ),
}  # fmt: skip


def inputs(seed: int) -> Batch:
    """Return a batch with the policy's logprobs in the column `new`, some near the old ones and some far away."""
    batch = random_batch(seed, columns=COLUMNS, sequences=16)
    draw = np.random.default_rng(seed)
    moved = batch["old_logprobs"] + draw.normal(size=batch.tokens) * draw.choice([0.05, 0.5, 2.0], batch.tokens)
    return batch.with_columns(new=np.where(batch["loss_mask"], np.minimum(moved, -1e-3), 0).astype(np.float32))


def ours(loss: Any, batch: Batch) -> tuple[float, Any]:
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    logprobs = torched["new"].clone().requires_grad_()
    result, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * result.terms[name] / counts[name] for name in result.terms)
    return float(value.detach()), torch.autograd.grad(value, logprobs)[0].numpy()


def theirs(formula: Formula, batch: Batch) -> tuple[float, Any]:
    """Return the mean over tokens of a formula, and its gradient [N]."""
    value, gradient, count = 0.0, np.zeros(batch.tokens), int(batch["loss_mask"].sum())
    ends = np.cumsum(batch["lengths"])
    own = batch["advantages"] if len(batch["advantages"]) == batch.tokens else None
    for i, (end, length) in enumerate(zip(ends, batch["lengths"], strict=True)):
        places = [place for place in range(end - length, end) if batch["loss_mask"][place]]
        new, old = batch["new"].astype(np.float64), batch["old_logprobs"].astype(np.float64)
        whole = math.fsum(new[place] - old[place] for place in places)
        for place in places:
            advantage = float(batch["advantages"][i] if own is None else own[place])
            loss, slope = formula(new[place], old[place], advantage, whole)
            value += loss / count
            gradient[place] = slope / count
    return value, gradient


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    (loss, formula), batch = CASES[name], inputs(seed)
    found, expected = ours(loss, batch), theirs(formula, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-7)


def covariances(batch: Batch) -> Any:
    """Return the covariance of each trained token by the old policy, and the places of these tokens."""
    places = np.flatnonzero(batch["loss_mask"])
    advantages = np.repeat(batch["advantages"].astype(np.float64), batch["lengths"])[places]
    logprobs = batch["old_logprobs"].astype(np.float64)[places]
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean()), places


@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_holds_the_tokens_of_largest_covariance_near_the_old_policy(seed: int) -> None:
    """As in the paper and verl there is no clipping; the divergence is KL(old || policy)."""
    batch = inputs(seed)
    each, places = covariances(batch)
    number = max(1, int(len(each) * 0.1))
    near = set(places[np.argsort(each)[-number:]].tolist())
    value, gradient = theirs(unclipped, batch)
    change = batch["new"].astype(np.float64) - batch["old_logprobs"]
    value += sum(0.8 * (math.exp(change[place]) - 1 - change[place]) for place in near) / len(places)
    for place in near:
        gradient[place] += 0.8 * (math.exp(change[place]) - 1) / len(places)
    treated, _ = treat_covariance(batch, CovarianceSection(method="kl-cov", share=0.1, weight=0.8), seed)
    found = ours(losses.ClippedPg(ClippedPgConfig(clip_low=1.0, clip_high=1e6)), treated)
    assert found[0] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-7)


def test_a_response_that_off_policy_masking_leaves_out_keeps_the_penalty_of_kl_cov() -> None:
    batch, _ = treat_covariance(inputs(2), CovarianceSection(method="kl-cov", share=0.3, weight=0.8), 2)
    masking = OffPolicySection(threshold=0.0)
    values = [
        [
            ours(losses.ClippedPg(ClippedPgConfig(off_policy=section)), one)[0]
            for section in (OffPolicySection(), masking)
        ]
        for one in (batch, batch.with_columns(old_kl_weight=np.zeros(batch.tokens, np.float32)))
    ]
    (penalised, penalised_and_masked), (plain, masked) = values
    assert masked != pytest.approx(plain, rel=1e-3), "some response is left out"
    assert penalised_and_masked - masked == pytest.approx(penalised - plain, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_is_that_of_verl_where_all_candidates_are_chosen(seed: int) -> None:
    """The first optimizer step: the policy is the old one, so that no token is clipped by its ratio before."""
    batch = inputs(seed)
    batch = batch.with_columns(new=batch["old_logprobs"])
    each, places = covariances(batch)
    value, gradient = theirs(unclipped, batch)
    for covariance, place in zip(each, places, strict=True):
        if 0.3 < covariance < 1.5:
            value -= gradient[place]  # at a ratio of 1 the loss of a token is its gradient
            gradient[place] = 0.0
    section = CovarianceSection(method="clip-cov", share=1.0, low=0.3, high=1.5)
    treated, _ = treat_covariance(batch, section, seed)
    found = ours(losses.ClippedPg(ClippedPgConfig()), treated)
    assert found[0] == pytest.approx(value, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-7)
    assert 0 < ((each > 0.3) & (each < 1.5)).sum() < len(each)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_for_the_distance_to_the_sampler_acts_on_all_tokens(estimator: str, seed: int) -> None:
    """With k2 and a weight of 0.002 it is the default of prime-rl, whose `kl_tau` is 1e-3."""
    batch = inputs(seed)
    batch = batch.with_columns(
        sampler_logprobs=batch["sampler_logprobs"] + batch["old_logprobs"], advantages=batch["advantages"] * (seed > 0)
    )
    value, gradient = theirs(dppo(binary_tv, 0.2, 0.2, math.inf), batch)
    change = np.clip(batch["new"].astype(np.float64) - batch["sampler_logprobs"], -20, 20)[batch["loss_mask"]]
    loss, slope = (
        (change**2 / 2, change) if estimator == "k2" else (np.exp(change) - 1 - change, np.exp(change) - 1)
    )  # fmt: skip
    value += 0.002 * loss.mean()
    gradient[batch["loss_mask"]] += 0.002 * slope * (abs(change) < 20) / len(change)
    section = KlOldSection(weight=0.002, estimator=estimator)  # type: ignore[arg-type]
    made = losses.Dppo(DppoConfig(bound_low=0.2, bound_high=0.2, max_weight=None, kl_old=section))
    found = ours(made, batch)
    assert found[0] == pytest.approx(value, rel=1e-4, abs=1e-7)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-3, atol=1e-8)
    assert made.live(batch.map(lambda column: torch.from_numpy(np.array(column)))).all()


def test_metrics_of_all_tokens_have_those_of_groups_without_an_advantage() -> None:
    batch = inputs(1)
    batch = batch.with_columns(advantages=np.where(np.arange(batch.sequences) < 4, batch["advantages"], 0))
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    entropy = torch.rand(batch.tokens)
    expected = {"live": torched["loss_mask"] & (torch.arange(batch.tokens) < int(batch["lengths"][:4].sum()))}
    expected["all"] = torched["loss_mask"]
    values = []
    for metrics, mask in expected.items():
        loss = losses.ClippedPg(ClippedPgConfig(entropy=True, metrics=metrics))  # type: ignore[arg-type]
        result = loss({"logprobs": torched["new"], "entropy": entropy}, torched)
        found = result.metrics["entropy"]
        assert found.number() == pytest.approx(float(entropy[mask].mean()), rel=1e-5)
        values.append(float(result.terms["policy"]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)
