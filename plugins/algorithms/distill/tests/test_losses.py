"""Averages of the losses of distillation, against means by hand in float64."""

import numpy as np
import pytest
import torch

from whet.component import Selection
from whet_distill.config import DistillDataConfig, FullKlConfig, SampleKlConfig, TeacherPgConfig
from whet_distill.data import DistillData
from whet_distill.hooks import whet_losses
from whet_distill.losses import FullKl, SampleKl, TeacherPg
from whet_testing.batches import random_batch

AVERAGES = {
    "token": {},
    "sequence": {"aggregation": "sequence"},
    "constant": {"aggregation": "constant", "max_length": 7},
}


def average(values, batch, aggregation):
    """Return a mean of values [N] over the trained tokens, sequence by sequence, and its gradient by each value [N]."""
    numbered = cut(np.arange(batch.tokens), batch), cut(batch["loss_mask"], batch)
    places = [part[mask] for part, mask in zip(*numbered, strict=True)]
    trained = sum(map(len, places))
    weights = np.zeros(batch.tokens)
    for part in places:
        share = {"token": 1 / trained, "sequence": 1 / len(places) / len(part), "constant": 1 / len(places) / 7}
        weights[part] = share[aggregation]
    return float((values.astype(np.float64) * weights).sum()), weights


def cut(column, batch):
    return np.split(np.asarray(column), np.cumsum(batch["lengths"])[:-1])


def found(loss, outputs, batch, leaf):
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    given = {name: torch.from_numpy(values).requires_grad_(name == leaf) for name, values in outputs.items()}
    result, counts = loss(given, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    return float(value.detach()), torch.autograd.grad(value, given[leaf])[0].numpy()


@pytest.mark.parametrize("aggregation", AVERAGES)
@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_is_averaged_as_configured(seed, aggregation):
    batch, draw = random_batch(seed), np.random.default_rng(seed)
    names = ("logprobs", "kl_forward", "kl_reverse")
    outputs = {name: draw.exponential(size=batch.tokens).astype(np.float32) for name in names}
    loss = FullKl(FullKlConfig(forward=0.25, likelihood=0.5, **AVERAGES[aggregation]))
    value, gradient = found(loss, outputs, batch, "kl_reverse")
    each = 0.25 * outputs["kl_forward"] + 0.75 * outputs["kl_reverse"] - 0.5 * outputs["logprobs"]
    expected, weights = average(each, batch, aggregation)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, 0.75 * weights, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AVERAGES)
@pytest.mark.parametrize("seed", range(3))
def test_the_policy_gradient_is_averaged_as_configured(seed, aggregation):
    columns = ["old_logprobs", "sampler_logprobs"]
    batch, draw = random_batch(seed, columns=columns), np.random.default_rng(seed)
    batch = batch.with_columns(advantages=draw.normal(size=batch.tokens).astype(np.float32))
    new = batch["old_logprobs"] + 0.05 * draw.normal(size=batch.tokens).astype(np.float32)
    loss = TeacherPg(TeacherPgConfig(clip_low=1.0, clip_high=9.0, **AVERAGES[aggregation]))
    value, gradient = found(loss, {"logprobs": new}, batch, "logprobs")
    each = -np.exp(new.astype(np.float64) - batch["old_logprobs"]) * batch["advantages"]
    expected, weights = average(each, batch, aggregation)
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradient, each * weights, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("aggregation", AVERAGES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_the_estimate_at_the_sampled_token_is_that_of_verl(estimator, spread, aggregation):
    """Its `kl_penalty` in float64, with a `loss_max_clamp` of 10, beyond which there is no gradient."""
    batch, draw = random_batch(0, columns=["sampler_logprobs"]), np.random.default_rng(1)
    student, teacher = (-draw.exponential(spread, batch.tokens).astype(np.float32) for _ in range(2))
    loss = SampleKl(SampleKlConfig(estimator=estimator, **AVERAGES[aggregation]))
    value, gradient = found(loss, {"logprobs": student}, batch.with_columns(teacher_logprobs=teacher), "logprobs")
    theirs = torch.from_numpy(student).double().requires_grad_()
    d = theirs - torch.from_numpy(teacher).double()
    bounded = (-d).clamp(-20, 20)
    each = {"k2": d**2 / 2, "k3": (bounded.exp() - bounded - 1).clamp(-10, 10), "abs": d.abs()}[estimator].clamp(
        -10, 10
    )
    slopes = torch.autograd.grad(each.sum(), theirs)[0].numpy()
    expected, weights = average(each.detach().numpy(), batch, aggregation)
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradient, slopes * weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("aggregation", "weight"), [("token", 5), ("sequence", 2), ("constant", 14)])
def test_a_batch_weighs_in_validation_as_its_loss_is_divided(aggregation, weight):
    batch = random_batch(0, sequences=2, group_size=1)
    mask = np.zeros(batch.tokens, bool)
    mask[[0, 1, 2, -1, -2]] = True
    (component,) = (one for one in whet_losses() if one.name == "full-kl")
    loss = Selection("losses", component, FullKlConfig(**AVERAGES[aggregation]), "whet-distill")
    assert DistillData(DistillDataConfig(loss=loss)).weight(batch.with_columns(loss_mask=mask)) == weight
