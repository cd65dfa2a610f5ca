"""Values and gradients of the policy losses of verl and NeMo RL, written again on padded rows in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whet.data.batch import Batch, from_sequences
from whet_grpo import losses
from whet_grpo.config import CispoConfig, ClippedPgConfig, GspoConfig, ReinforceConfig
from whet_ops.algorithms.config import KlLossSection

SIZES = np.array([3, 1, 5, 2, 4, 1, 2])
LONGEST = int(SIZES.max())
MASK = torch.arange(LONGEST) < torch.from_numpy(SIZES)[:, None]
DRAW = np.random.default_rng(7)
NEW, OLD, SAMPLER, REFERENCE = (torch.from_numpy(DRAW.normal(-1.2, 0.5, (7, LONGEST))) for _ in range(4))
ADVANTAGES = torch.from_numpy(DRAW.normal(size=7))[:, None]


def batch() -> Batch:
    rows = [{"tokens": range(n + 1), "loss_mask": np.arange(n + 1) > 0} for n in SIZES]
    made = from_sequences(rows, prompt_lengths=[1] * len(rows))
    padded = {"new": NEW, "old_logprobs": OLD, "sampler_logprobs": SAMPLER, "reference_logprobs": REFERENCE}
    columns = {
        name: np.concatenate([[0.0, *row[:n]] for row, n in zip(values.numpy(), SIZES, strict=True)])
        for name, values in padded.items()
    }
    columns = {name: values.astype(np.float32) for name, values in columns.items()}
    return made.with_columns(advantages=ADVANTAGES[:, 0].numpy().astype(np.float32), **columns)


def token_mean(values: Tensor) -> Tensor:
    return (values * MASK).sum() / MASK.sum()


def sequence_mean(values: Tensor) -> Tensor:
    return ((values * MASK).sum(1) / MASK.sum(1)).mean()


def verl_vanilla(new: Tensor) -> Tensor:
    ratio = (new - OLD).clamp(-20, 20).exp()
    plain = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.8, 1.28))
    return torch.where(ADVANTAGES < 0, torch.minimum(-ADVANTAGES * 1.5, plain), plain)


def verl_gspo(new: Tensor) -> Tensor:
    whole = ((new - OLD) * MASK).sum(1) / MASK.sum(1)
    ratio = (new - new.detach() + whole.detach()[:, None]).clamp(max=10.0).exp()
    return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.9, 1.1))


def nemo_gspo(new: Tensor) -> Tensor:
    ratio = (((new - OLD) * MASK).sum(1) / MASK.sum(1)).exp()[:, None]
    return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.9, 1.1)).expand(MASK.shape)


def cispo(new: Tensor) -> Tensor:
    return -(new - OLD).exp().clamp(0.8, 1.28).detach() * ADVANTAGES * new


def verl_low_variance(new: Tensor) -> Tensor:
    d = (REFERENCE - new).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def verl_straight(new: Tensor) -> Tensor:
    half = (new - REFERENCE).square() / 2
    return half - half.detach() + verl_low_variance(new).detach()


def nemo_kl(new: Tensor) -> Tensor:
    return ((new - new.detach()).exp() * ((REFERENCE - new).exp() - 1 - (REFERENCE - new))).clamp(-10, 10)


def nemo_on_policy_kl(new: Tensor) -> Tensor:
    return ((new - OLD).exp() * ((REFERENCE - new).exp() - 1 - (REFERENCE - new))).clamp(-10, 10)


def with_kl(kl: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda new: mean(verl_vanilla(new)) + 0.3 * mean(kl(new))


VANILLA: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.5}
CASES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "verl, vanilla": (losses.ClippedPg(ClippedPgConfig(**VANILLA)), lambda new: token_mean(verl_vanilla(new))),
    "verl, vanilla by sequence": (
        losses.ClippedPg(ClippedPgConfig(**VANILLA, aggregation="sequence")),
        lambda new: sequence_mean(verl_vanilla(new)),
    ),
    "verl, gspo": (
        losses.Gspo(GspoConfig(level="token", clip_low=0.1, clip_high=0.1)),
        lambda new: sequence_mean(verl_gspo(new)),
    ),
    "NeMo RL, gspo": (
        losses.Gspo(GspoConfig(clip_low=0.1, clip_high=0.1)), lambda new: sequence_mean(nemo_gspo(new)),
    ),
    "both, cispo": (losses.Cispo(CispoConfig(clip_low=0.2, clip_high=0.28)), lambda new: token_mean(cispo(new))),
    "both, without a ratio": (
        losses.Reinforce(ReinforceConfig(max_weight=None)), lambda new: token_mean(-ADVANTAGES * new),
    ),
    "verl, low_var_kl": (
        losses.ClippedPg(ClippedPgConfig(**VANILLA, kl=KlLossSection(weight=0.3))),
        with_kl(verl_low_variance, token_mean),
    ),
    "verl, k3+": (
        losses.ClippedPg(ClippedPgConfig(**VANILLA, kl=KlLossSection(weight=0.3, straight_through=True))),
        with_kl(verl_straight, token_mean),
    ),
    "NeMo RL, kl": (
        losses.ClippedPg(ClippedPgConfig(**VANILLA, kl=KlLossSection(weight=0.3, importance="score"))),
        with_kl(nemo_kl, token_mean),
    ),
    "NeMo RL, on-policy kl by sequence": (
        losses.ClippedPg(
            ClippedPgConfig(
                **VANILLA, aggregation="sequence", kl=KlLossSection(weight=0.3, importance="ratio")
            )
        ),
        with_kl(nemo_on_policy_kl, sequence_mean),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_peer(name: str) -> None:
    loss, formula = CASES[name]
    torched = batch().map(lambda column: torch.from_numpy(np.array(column)))
    ours, theirs = torched["new"].clone().requires_grad_(), NEW.clone().requires_grad_()
    result, counts = loss({"logprobs": ours}, torched), loss.counts(torched)
    found = sum(loss.weights[term] * total / counts[term] for term, total in result.terms.items())
    expected = formula(theirs)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    slopes = torch.autograd.grad(found, ours)[0], torch.autograd.grad(expected, theirs)[0]
    torch.testing.assert_close(slopes[0][torched["loss_mask"]].double(), slopes[1][MASK], atol=1e-6, rtol=1e-4)
