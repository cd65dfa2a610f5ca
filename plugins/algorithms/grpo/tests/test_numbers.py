"""Values and gradients that TRL 1.16.0's own loss gave on the same inputs, by `GRPOTrainer._compute_loss`."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.batch import Batch, from_sequences
from whet_grpo.config import CispoConfig, ClippedPgConfig, GspoConfig
from whet_grpo.losses import Cispo, ClippedPg, Gspo
from whet_ops.algorithms.config import CorrectionSection, KlLossSection
from whet_ops.algorithms.policy_steps import correct_gap
from whet_ops.correction import importance_weights

SIZES = (7, 3, 5, 1, 6)
ADVANTAGES = np.array([1.5, -0.7, 0.0, -2.0, 0.4], np.float32)


def row(sequence: int) -> Any:
    """The numbers that the inputs of one response are made of."""
    return np.arange(7, dtype=np.float64)[: SIZES[sequence]] + 7 * sequence


def columns(sequence: int) -> dict[str, Any]:
    n = row(sequence)
    new = -1.6 + 1.4 * np.sin(n)
    old = new + 0.6 * np.sin(2.3 * n + 1)
    made = {"new": new, "old_logprobs": old, "sampler_logprobs": old, "reference_logprobs": new + 0.8 * np.cos(1.7 * n)}
    padded = {name: np.concatenate([[0.0], values]).astype(np.float32) for name, values in made.items()}
    return {"tokens": np.arange(len(n) + 1), "loss_mask": np.arange(len(n) + 1) > 0, **padded}


def inputs() -> Batch:
    return from_sequences([columns(i) for i in range(5)], prompt_lengths=[1] * 5).with_columns(advantages=ADVANTAGES)


def objective(loss: Any, batch: Batch) -> tuple[float, Any]:
    """Return the objective, and its gradient at the first token of the first response and of the fourth."""
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    logprobs = torched["new"].clone().requires_grad_()
    result, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    (gradient,) = torch.autograd.grad(value, logprobs)
    starts = np.cumsum(batch["lengths"]) - batch["lengths"]
    return float(value.detach()), [float(gradient[starts[i] + 1]) for i in (0, 3)]


def penalty(**options: Any) -> KlLossSection:
    return KlLossSection(weight=0.1, clamp=0.0, **options)


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        # loss_type="dapo", epsilon_high=0.28
        (ClippedPg(ClippedPgConfig(clip_high=0.28)), -0.2827264, [-0.041153, 0.148897]),
        # loss_type="grpo", beta=0.1
        (
            ClippedPg(ClippedPgConfig(clip_high=0.28, aggregation="sequence", kl=penalty())),
            0.4805099, [-0.029369, 0.660801],
        ),
        # the same with use_bias_correction_kl
        (
            ClippedPg(ClippedPgConfig(clip_high=0.28, aggregation="sequence", kl=penalty(importance="ratio"))),
            0.4829141, [-0.027247, 0.666031],
        ),
        # loss_type="dr_grpo", max_completion_length=10
        (
            ClippedPg(ClippedPgConfig(clip_high=0.28, aggregation="constant", max_length=10)),
            -0.1243996, [-0.018107, 0.065515],
        ),
        # importance_sampling_level="sequence", epsilon=0.03, epsilon_high=0.04
        (Gspo(GspoConfig(clip_low=0.03, clip_high=0.04)), 0.4508812, [-0.039090, 0.655146]),
        (Gspo(GspoConfig(clip_low=0.03, clip_high=0.04, level="token")), 0.4508812, [-0.039090, 0.655146]),
        # loss_type="cispo", epsilon_high=1.3, which TRL takes for the bound itself
        (Cispo(CispoConfig(clip_high=0.3)), 0.7687525, [-0.041153, 0.118182]),
        # delta=1.4
        (ClippedPg(ClippedPgConfig(clip_high=0.28, clip_dual=1.4)), -0.3172300, [-0.041153, 0.0]),
    ],
    ids=["dapo", "grpo", "bias-corrected", "dr-grpo", "gspo", "gspo-token", "cispo", "dual"],
)  # fmt: skip
def test_losses_are_those_of_trl(loss: Any, value: float, gradient: list[float]) -> None:
    found = objective(loss, inputs())
    assert found[0] == pytest.approx(value, abs=2e-6)
    assert found[1] == pytest.approx(gradient, abs=2e-6)


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        (ClippedPg(ClippedPgConfig(clip_high=0.28)), -0.3337667, [-0.061729, 0.113226]),
        (Cispo(CispoConfig(clip_high=0.3)), 0.8115000, [-0.061729, 0.089870]),
    ],
    ids=["dapo", "cispo"],
)
def test_importance_weights_are_those_of_trl(loss: Any, value: float, gradient: list[float]) -> None:
    """With `importance_sampling_ratio` min(exp(cos(n) / 2), 1.5): here by a sampler whose logprobs differ so much."""
    batch = inputs()
    shift = np.concatenate([np.concatenate([[0.0], 0.5 * np.cos(row(i))]) for i in range(5)])
    batch = batch.with_columns(sampler_logprobs=(batch["old_logprobs"] - shift).astype(np.float32))
    corrected, _ = correct_gap(batch, CorrectionSection(weights="token", cap=1.5))
    found = objective(loss, corrected)
    assert found[0] == pytest.approx(value, abs=2e-6)
    assert found[1] == pytest.approx(gradient, abs=2e-6)


def test_whole_sequences_are_those_of_trls_rloo() -> None:
    """Its loss written again in float64: the ratio of summed logprobs, clipped, and the mean over sequences."""
    batch = inputs()
    ends = np.cumsum(batch["lengths"])
    change = batch["new"].astype(np.float64) - batch["old_logprobs"]
    sums = np.array([change[end - length : end].sum() for end, length in zip(ends, batch["lengths"], strict=True)])
    ratio, advantages = np.exp(sums), ADVANTAGES.astype(np.float64)
    expected = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
    found, _ = objective(Gspo(GspoConfig(ratio="product", clip_low=0.2, clip_high=0.2)), batch)
    assert found == pytest.approx(expected, rel=1e-5)


def nemo_seq_mask_tis(batch: Batch, low: float, high: float) -> float:
    """NeMo RL's clipped loss with `seq-mask-tis` and k3, written again from its formula in float64."""
    total, kl, tokens = 0.0, 0.0, 0
    ends = np.cumsum(batch["lengths"])
    for end, length, advantage in zip(ends, batch["lengths"], batch["advantages"], strict=True):
        where = slice(end - length + 1, end)
        new, old, ref, sampler = (
            batch[name][where].astype(np.float64)
            for name in ("new", "old_logprobs", "reference_logprobs", "sampler_logprobs")
        )
        ratio, weights = np.exp(new - old), np.exp(old - sampler)
        kept = low <= math.exp(float(np.mean(old - sampler))) <= high
        gain = np.maximum(-advantage * ratio, -advantage * ratio.clip(0.8, 1.28))
        total += float((weights * gain).sum()) * kept
        kl += float((np.exp(ref - new) - (ref - new) - 1).sum())
        tokens += len(new)
    return (total + 0.1 * kl) / tokens


def test_masked_sequences_are_those_of_nemo_rl() -> None:
    batch = inputs()
    shift = np.concatenate([np.concatenate([[0.0], 0.3 * np.cos(1.3 * row(i))]) for i in range(5)])
    batch = batch.with_columns(sampler_logprobs=(batch["old_logprobs"] - shift).astype(np.float32))
    section = CorrectionSection(weights="token", cap=1e9, mask="sequence", low=0.95, high=1.1)
    corrected, metrics = correct_gap(batch, section)
    assert 0 < metrics["correction/masked"].number() < 1
    found, _ = objective(ClippedPg(ClippedPgConfig(clip_high=0.28, kl=penalty(importance="score"))), corrected)
    assert found == pytest.approx(nemo_seq_mask_tis(batch, 0.95, 1.1), rel=1e-5)
    gaps = np.where(batch["loss_mask"], batch["old_logprobs"] - batch["sampler_logprobs"], 0)
    assert importance_weights(gaps, batch["lengths"], "sequence", 0, 9.0).shape == (5,)
