"""Estimates against exact divergences: means over a whole vocabulary, so that nothing is left to chance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whet_ops.kl import kl_estimate, log_ratio, penalty_of_kl

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.1, -0.2, 0.3, -0.9, 0.5], dtype=torch.float64), 0)
SAMPLER = torch.log_softmax(torch.tensor([0.9, 0.2, -0.3, 0.4, 0.0], dtype=torch.float64), 0)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def slope_of(loss: Any) -> Tensor:
    """Return the gradient of a function of the policy's logprobs by the logits."""
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(torch.log_softmax(logits, 0)), logits)
    return gradient


def mean_slope(drawn_from: Tensor | None = None, **options: Any) -> Tensor:
    """Return the gradient of the penalty, averaged over tokens drawn from the policy, or from another."""
    others = torch.log_softmax(LOGITS, 0) if drawn_from is None else drawn_from
    chances = others.exp().detach()
    return slope_of(lambda p: (chances * penalty_of_kl(p, REFERENCE, others.detach(), **options)).sum())


FORWARD = slope_of(lambda p: divergence(p, REFERENCE))
BACKWARD = slope_of(lambda p: divergence(REFERENCE, p))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Any) -> None:
    p = torch.log_softmax(LOGITS, 0)
    found = (p.exp() * kl_estimate(p - REFERENCE, estimator)).sum()
    assert float(found) == pytest.approx(float(divergence(p, REFERENCE)))


def test_k2_is_half_the_square() -> None:
    assert kl_estimate(np.array([-3.0, 0.0, 0.5]), "k2").tolist() == [4.5, 0.0, 0.125]


def test_as_a_loss_k1_regularises_nothing() -> None:
    torch.testing.assert_close(mean_slope(estimator="k1"), torch.zeros(5).double(), atol=1e-6, rtol=0)


def test_as_a_loss_k2_has_the_gradient_of_the_divergence() -> None:
    torch.testing.assert_close(mean_slope(estimator="k2"), FORWARD, atol=1e-6, rtol=1e-5)


def test_as_a_loss_k3_has_the_gradient_of_the_other_divergence() -> None:
    torch.testing.assert_close(mean_slope(estimator="k3"), BACKWARD, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("options", [{"importance": "score"}, {"importance": "ratio"}, {"straight_through": True}])
def test_three_ways_give_the_gradient_of_the_divergence_on_policy(estimator: Any, options: dict[str, Any]) -> None:
    torch.testing.assert_close(mean_slope(estimator=estimator, **options), FORWARD, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_ratio_gives_it_off_policy_too(estimator: Any) -> None:
    found = mean_slope(SAMPLER, estimator=estimator, importance="ratio")
    torch.testing.assert_close(found, FORWARD, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(mean_slope(SAMPLER, estimator=estimator, importance="score"), FORWARD, atol=1e-3)


@pytest.mark.parametrize("options", [{"importance": "score"}, {"straight_through": True}])
def test_what_mends_the_gradient_leaves_the_value(options: dict[str, Any]) -> None:
    p = torch.log_softmax(LOGITS, 0)
    plain = penalty_of_kl(p, REFERENCE, SAMPLER, "k3")
    torch.testing.assert_close(penalty_of_kl(p, REFERENCE, SAMPLER, "k3", **options), plain)


def test_beyond_the_clamps_there_is_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -30.0, -12.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -1.0])
    estimate = penalty_of_kl(logprobs, reference, logprobs.detach(), "k3", limit=20.0, clamp=10.0)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    # d = 0.5, -29 (the log-ratio's clamp), -11 (exp(11) - 12 is beyond 10)
    assert estimate.tolist() == pytest.approx([math.exp(-0.5) - 0.5, 10.0, 10.0])
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 0, 0])


def nemo_rl(logprobs: Tensor, reference: Tensor, old: Tensor | None, kind: str) -> Tensor:
    """NeMo RL's penalty with its importance weights, written again: both clamps keep the weight's gradient out, too."""
    weight = (logprobs - (logprobs.detach() if old is None else old)).exp()
    free = reference - logprobs
    logr = free.clamp(-20.0, 20.0)
    weight = torch.where(free == logr, weight, weight.detach())
    kl = {"k1": -logr, "k2": logr.square() / 2, "k3": logr.exp() - 1 - logr}[kind]
    return (weight * kl).clamp(-10.0, 10.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("importance", ["score", "ratio"])
def test_weighted_and_clamped_it_is_that_of_nemo_rl(estimator: Any, importance: Any) -> None:
    draw = np.random.default_rng(0)
    start = torch.tensor(np.append(draw.normal(-2, 1.5, 30), [-30.0, -8.0, -1.0]))
    reference, old = torch.tensor(np.append(draw.normal(-2, 1.5, 30), [-1.0, -1.0, -9.0])), start + 0.3
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found = penalty_of_kl(ours, reference, old, estimator, importance=importance, limit=20.0, clamp=10.0)
    expected = nemo_rl(theirs, reference, None if importance == "score" else old, estimator)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(x.sum(), y)[0] for x, y in ((found, ours), (expected, theirs))]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("importance", ["none", "score", "ratio"])
def test_far_beyond_the_clamp_there_is_no_gradient_and_no_nan(importance: Any) -> None:
    logprobs = torch.tensor([-80.0, -89.0, -1000.0], requires_grad=True)
    found = penalty_of_kl(
        logprobs, torch.zeros(3), logprobs.detach(), "k3", importance=importance, limit=0.0, clamp=10.0
    )
    found.sum().backward()
    assert found.tolist() == [10.0] * 3
    assert logprobs.grad.tolist() == [0.0] * 3


def test_verls_absolute_estimate() -> None:
    assert kl_estimate(np.array([-3.0, 0.0, 0.5]), "abs").tolist() == [3.0, 0.0, 0.5]
    assert kl_estimate(torch.tensor([-3.0, 0.5]), "abs", 1.0).tolist() == [1.0, 0.5]


def test_small_divergences_are_no_rounding_errors() -> None:
    d = torch.full((1,), 1e-4)
    assert float(kl_estimate(d, "k3")) == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_impossible_tokens_give_finite_ratios(make: Any) -> None:
    inf = math.inf
    found = log_ratio(make([-inf, -1.0, -inf, -1.0]), make([-1.0, -inf, -inf, -3.0]))
    assert found.tolist() == [-20.0, 20.0, 0.0, 2.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("importance", ["none", "score", "ratio"])
@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("log_ratio", [-math.inf, -50.0, 50.0, math.inf])
def test_extreme_log_ratios_are_finite(
    estimator: Any, importance: Any, straight_through: bool, log_ratio: float
) -> None:
    start = torch.tensor([-1.0 + min(log_ratio, 0.0)])
    logprobs, other = start.clone().requires_grad_(), torch.tensor([-1.0 - max(log_ratio, 0.0)])
    found = penalty_of_kl(
        logprobs, other, other, estimator, importance=importance, straight_through=straight_through, clamp=10.0
    )
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient).all()


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=8), st.sampled_from(["k1", "k2", "k3"]))
def test_numpy_and_torch_agree(log_ratios: list[float], estimator: Any) -> None:
    ours = kl_estimate(np.array(log_ratios), estimator, 10.0)
    np.testing.assert_allclose(
        ours, kl_estimate(torch.tensor(log_ratios, dtype=torch.float64), estimator, 10.0), atol=1e-12
    )


@pytest.mark.parametrize("importance", ["ratio", "score"])
def test_the_weight_itself_is_not_clamped(importance: Any) -> None:
    """The token is 25 nats likelier than when it was sampled, and the reference a thousandth of a nat away."""
    start, reference, old = torch.tensor([-1.0]).double(), torch.tensor([-1.001]), torch.tensor([-26.0])
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found = penalty_of_kl(ours, reference, old, "k1", importance=importance, limit=20.0, clamp=0.0)
    weight = (theirs - (old if importance == "ratio" else theirs.detach())).exp()
    expected = weight * (theirs - reference)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    assert importance == "score" or float(found.detach()) > math.exp(20) * 0.001 * 10
    slopes = [torch.autograd.grad(x.sum(), y)[0] for x, y in ((found, ours), (expected, theirs))]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=0)
