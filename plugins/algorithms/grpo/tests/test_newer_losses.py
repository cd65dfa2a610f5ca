"""SAPO, GMPO, off-policy masking, entropy, the KL's weights: numbers of peers, and formulas written again in float64.

Numbers of TRL are those that `GRPOTrainer._compute_loss` of TRL 1.16.0 gave on the inputs of `test_numbers`. Formulas
of verl and NeMo RL stand on padded rows, as theirs do.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.data.batch import Batch, from_sequences
from whet_grpo import losses
from whet_grpo.config import (
    CispoConfig,
    ClippedPgConfig,
    DppoConfig,
    GmpoConfig,
    GspoConfig,
    OffPolicySection,
    ReinforceConfig,
    SapoConfig,
    VespoConfig,
)
from whet_ops.algorithms.config import KlLossSection, LikelihoodSection, TopEntropySection
from whet_ops.algorithms.policy_steps import keep_uncertain
from whet_testing.fakes import FakeBackend

SIZES = (7, 3, 5, 1, 6)
ADVANTAGES = np.array([1.5, -0.7, 0.0, -2.0, 0.4], np.float32)


def columns(sequence: int) -> dict[str, Any]:
    n = np.arange(7, dtype=np.float64)[: SIZES[sequence]] + 7 * sequence
    new = -1.6 + 1.4 * np.sin(n)
    old = new + 0.6 * np.sin(2.3 * n + 1)
    made = {
        "new": new, "old_logprobs": old, "sampler_logprobs": old + 0.3 * np.cos(1.3 * n),
        "reference_logprobs": new + 0.8 * np.cos(1.7 * n), "uncertainty": 1.0 + 0.9 * np.sin(0.7 * n + 0.3),
    }  # fmt: skip
    padded = {name: np.concatenate([[0.0], values]).astype(np.float32) for name, values in made.items()}
    return {"tokens": np.arange(len(n) + 1), "loss_mask": np.arange(len(n) + 1) > 0, **padded}


def inputs(**changes: Any) -> Batch:
    made = from_sequences([columns(i) for i in range(5)], prompt_lengths=[1] * 5)
    return made.with_columns(**{"advantages": ADVANTAGES, "reward": ADVANTAGES, **changes})


def objective(loss: Any, batch: Batch) -> tuple[float, Tensor]:
    """Return the objective, and its gradient by the policy's logprobs [N]."""
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    logprobs = torched["new"].clone().requires_grad_()
    result, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    return float(value.detach()), torch.autograd.grad(value, logprobs)[0]


def sizes_of(gradient: Tensor, batch: Batch) -> list[float]:
    """Return the sum of the sizes of each sequence's gradients."""
    return [float(part.abs().sum()) for part in gradient.split(batch["lengths"].tolist())]


def penalty(**options: Any) -> KlLossSection:
    return KlLossSection(weight=0.1, clamp=0.0, clamp_log_ratio=0.0, **options)


def near(threshold: float, since: Any) -> OffPolicySection:
    return OffPolicySection(threshold=threshold, since=since)


def moved(name: str, place: int, nats: float) -> Batch:
    """Return the inputs with one logprob further down; the place is among all tokens."""
    batch = inputs()
    values = batch[name].copy()
    values[place] -= nats
    return batch.with_columns(**{name: values})


class Entropy(FakeBackend):
    """A backend that knows how uncertain the policy is."""

    def score(self, batch: Batch, outputs: tuple[str, ...], weights: Any = "policy") -> dict[str, Any]:
        assert outputs == ("entropy",)
        return {"entropy": np.where(batch["loss_mask"], batch["uncertainty"], np.float32(0))}


TRL: dict[str, tuple[Any, Batch, float, list[float]]] = {
    "sapo": (losses.Sapo(SapoConfig()), inputs(), 0.5315937, [0.284975, 0.143249, 0.0, 0.586839, 0.077844]),
    "sapo, beta=0.1": (
        losses.Sapo(SapoConfig(kl=penalty())), inputs(),
        0.5468057, [0.288201, 0.137508, 0.011366, 0.592493, 0.081593],
    ),
    "off_policy_mask_threshold=0.08, the other way round": (
        losses.ClippedPg(ClippedPgConfig(clip_high=0.28, off_policy=near(0.08, "old"))),
        inputs(advantages=-ADVANTAGES),
        -0.0839945, [0.0, 0.050032, 0.0, 0.0, 0.079492],
    ),
    "the same with vLLM's logprobs and beta=0.1": (
        losses.ClippedPg(ClippedPgConfig(clip_high=0.28, off_policy=near(0.08, "sampler"), kl=penalty())),
        inputs(advantages=-ADVANTAGES),
        -0.0668184, [0.018352, 0.053946, 0.012916, 0.001285, 0.091350],
    ),
    "importance_sampling_level=sequence, use_bias_correction_kl": (
        losses.Gspo(GspoConfig(clip_low=0.2, clip_high=0.28, kl=penalty(importance="sequence"))), inputs(),
        0.4663579, [0.273286, 0.142859, 0.010799, 0.666031, 0.075635],
    ),
    "the same, with one token 30 nats away": (
        losses.Gspo(GspoConfig(clip_low=0.2, clip_high=0.28)), moved("old_logprobs", 10, 30.0),
        3193.1782227, [],
    ),
    "use_bias_correction_kl, with one token 25 nats away": (
        losses.ClippedPg(
            ClippedPgConfig(
                clip_high=0.28, aggregation="sequence", clamp_log_ratio=0.0, kl=penalty(importance="ratio")
            )
        ),
        moved("old_logprobs", 3, 25.0),
        7.0566808e7, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_value_and_gradient_are_those_of_trl(name: str) -> None:
    loss, batch, value, sizes = TRL[name]
    found, gradient = objective(loss, batch)
    assert found == pytest.approx(value, rel=5e-6, abs=2e-6)
    if name == "the same, with one token 30 nats away":
        expected = [0.0, *[1064.290894] * 3]
        assert gradient[8:12].tolist() == pytest.approx(expected, rel=1e-5)
    elif sizes:
        assert sizes_of(gradient, batch) == pytest.approx(sizes, abs=5e-6)


@pytest.mark.parametrize(
    ("share", "config", "value", "sizes"),
    [
        (0.2, ClippedPgConfig(clip_high=0.28), -0.2360686, [0.112393, 0.0, 0.0, 0.0, 0.013130]),
        (
            0.5, ClippedPgConfig(clip_high=0.28, aggregation="sequence", kl=penalty()),
            0.4683367, [0.107490, 0.051960, 0.011366, 0.660801, 0.027157],
        ),
    ],
)  # fmt: skip
def test_tokens_of_high_entropy_are_those_of_trl(
    share: float, config: ClippedPgConfig, value: float, sizes: list[float]
) -> None:
    batch, metrics = keep_uncertain(inputs(), Entropy(), TopEntropySection(share=share))
    found, gradient = objective(losses.ClippedPg(config), batch)
    assert found == pytest.approx(value, abs=2e-6)
    assert sizes_of(gradient, batch) == pytest.approx(sizes, abs=5e-6)
    assert metrics["top_entropy/share"].number() == pytest.approx(share, abs=0.05)


def test_tokens_of_low_entropy_may_leave_the_mean() -> None:
    batch, _ = keep_uncertain(inputs(), Entropy(), TopEntropySection(share=0.5, count_rest=False))
    whole, _ = keep_uncertain(inputs(), Entropy(), TopEntropySection(share=0.5))
    loss = losses.ClippedPg(ClippedPgConfig())
    kept = int(batch["loss_mask"].sum())
    assert kept == 11
    assert objective(loss, batch)[0] == pytest.approx(objective(loss, whole)[0] * 22 / kept, rel=1e-5)


LONGEST = max(SIZES)
MASK = torch.arange(LONGEST) < torch.tensor(SIZES)[:, None]


def padded(batch: Batch, name: str) -> Tensor:
    """Return a column as padded rows in float64, without prompts."""
    rows = np.split(np.asarray(batch[name], np.float64), np.cumsum(batch["lengths"])[:-1])
    return torch.tensor(np.stack([np.pad(row[1:], (0, LONGEST - len(row) + 1)) for row in rows]))


def verl_sapo(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - padded(batch, "old_logprobs")).clamp(-20, 20).exp()
    tau = torch.where(advantages > 0, torch.tensor(1.3), torch.tensor(0.7))
    gates = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return ((-gates * advantages * MASK).sum(1) / MASK.sum(1)).mean()


def verl_geo_mean(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    change, sign = new - padded(batch, "old_logprobs"), torch.sign(advantages)
    near = torch.clamp(change, -0.3, 0.35)
    least = sign * torch.min(sign * change, sign * near)
    ratio = ((least * MASK).sum(1) / MASK.sum(1)).exp()
    return (-advantages[:, 0] * ratio).mean()


def authors_gmpo(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    """The loop of its authors, a sequence at a time; bounds of 0.3 on both sides."""
    old, found = padded(batch, "old_logprobs"), []
    for i, size in enumerate(SIZES):
        sign = -1 if advantages[i, 0] >= 0 else 1
        change = sign * (new[i] - old[i])
        worst = sign * torch.max(change, change.clamp(-0.3, 0.3))
        found.append(-advantages[i, 0] * (worst[:size].sum() / size).exp())
    return torch.stack(found).mean()


def nemo_positive_likelihood(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - padded(batch, "old_logprobs")).exp()
    policy = (torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * MASK).sum() / MASK.sum()
    right = MASK & (advantages > 0)  # rewards are the advantages here
    return policy + 0.3 * (-new * right).sum() / right.sum()


def nemo_sampler_kl(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    ratio = (new - padded(batch, "old_logprobs")).exp()
    policy = (torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * MASK).sum() / MASK.sum()
    logr = (padded(batch, "reference_logprobs") - new).clamp(-20, 20)
    weight = (new - padded(batch, "sampler_logprobs")).exp()
    kl = (weight * (logr.exp() - 1 - logr)).clamp(-10, 10)
    return policy + 0.3 * (kl * MASK).sum() / MASK.sum()


def deepseek_mask(batch: Batch, new: Tensor, advantages: Tensor) -> Tensor:
    """Section 3.1 of DeepSeek-V3.2, with GRPO's mean by sequence."""
    ratio = (new - padded(batch, "old_logprobs")).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    distance = ((padded(batch, "sampler_logprobs") - new.detach()) * MASK).sum(1) / MASK.sum(1)
    kept = ~((advantages[:, 0] < 0) & (distance > -0.3))
    assert kept.tolist() == [True, False, True, True, True]
    return -(((surrogate * MASK).sum(1) / MASK.sum(1)) * kept).mean()


Formula = Callable[[Batch, Tensor, Tensor], Tensor]
FORMULAS: dict[str, tuple[Any, Formula]] = {
    "verl, sapo": (losses.Sapo(SapoConfig(temperature_positive=1.3, temperature_negative=0.7)), verl_sapo),
    "verl, geo_mean": (losses.Gmpo(GmpoConfig(clip_low=0.3, clip_high=0.35)), verl_geo_mean),
    "GMPO's authors": (losses.Gmpo(GmpoConfig(clip_low=0.3, clip_high=0.3)), authors_gmpo),
    "NeMo RL, positive_example_nll_weight": (
        losses.ClippedPg(ClippedPgConfig(likelihood=LikelihoodSection(weight=0.3, at_least=1e-30))),
        nemo_positive_likelihood,
    ),
    "NeMo RL, use_on_policy_kl_approximation": (
        losses.ClippedPg(ClippedPgConfig(kl=KlLossSection(weight=0.3, importance="sampler"))),
        nemo_sampler_kl,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    loss, formula = FORMULAS[name]
    batch = inputs()
    found, slopes = objective(loss, batch)
    theirs = padded(batch, "new").requires_grad_()
    expected = formula(batch, theirs, torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None])
    assert found == pytest.approx(float(expected.detach()), rel=1e-5)
    (other,) = torch.autograd.grad(expected, theirs)
    torch.testing.assert_close(slopes[torch.tensor(batch["loss_mask"])].double(), other[MASK], atol=1e-6, rtol=1e-4)


def test_off_policy_masking_is_that_of_deepseek() -> None:
    batch = inputs()
    # A threshold below 0 is refused; so the sampler's logprobs are lifted, by which the bad responses have fallen.
    lifted = batch.with_columns(sampler_logprobs=batch["sampler_logprobs"] + np.float32(0.3))
    section = OffPolicySection(threshold=0.0)
    config = ClippedPgConfig(aggregation="sequence", off_policy=section)
    found, _ = objective(losses.ClippedPg(config), lifted)
    new = padded(batch, "new")
    expected = deepseek_mask(batch, new, torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None])
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda **o: losses.ClippedPg(ClippedPgConfig(**o)),
        lambda **o: losses.Reinforce(ReinforceConfig(max_weight=1e6, **o)),
        lambda **o: losses.Cispo(CispoConfig(clip_high=1e6, **o)),
        lambda **o: losses.Gspo(GspoConfig(clip_high=1e6, **o)),
        lambda **o: losses.Gspo(GspoConfig(ratio="product", **o)),
        lambda **o: losses.Gmpo(GmpoConfig(**o)),
        lambda **o: losses.Sapo(SapoConfig(**o)),
        lambda **o: losses.Vespo(VespoConfig(**o)),
        lambda **o: losses.Dppo(DppoConfig(max_weight=1e6, **o)),
    ],
)
def test_a_ratio_is_bounded_where_it_is_asked_to_be(loss: Any) -> None:
    rows = [{"tokens": [1, 2], "loss_mask": [False, True], "new": [0.0, -1.0], "old_logprobs": [0.0, -31.0]}]
    made = from_sequences([{k: np.array(v) for k, v in row.items()} for row in rows], prompt_lengths=[1])
    made = made.with_columns(
        advantages=np.array([-1.0], np.float32), new=made["new"].astype(np.float32),
        old_logprobs=made["old_logprobs"].astype(np.float32), sampler_logprobs=made["new"].astype(np.float32),
    )  # fmt: skip
    for options, nats in (({}, 20.0), ({"clamp_log_ratio": 5.0}, 5.0), ({"clamp_log_ratio": 0.0}, 30.0)):
        torched = made.map(lambda column: torch.from_numpy(np.array(column)))
        found = loss(**options)({"logprobs": torched["new"]}, torched).metrics["ratio/max"].number()
        assert float(found) == pytest.approx(math.exp(nats), rel=1e-5)
