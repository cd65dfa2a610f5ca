import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whet_ops.losses import (
    cispo,
    clip_ratio,
    clipped_policy_gradient,
    dppo,
    gmpo,
    near_policy,
    reinforce,
    sapo,
    sequence_ratio,
    vespo,
)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def loss_and_gradient(log_ratio: float, advantage: float, low: float = 0.2, high: float = 0.3) -> tuple[float, float]:
    logprobs = tensor(-1.0 + log_ratio).requires_grad_()
    loss = clipped_policy_gradient(logprobs, tensor(-1.0), tensor(advantage), low, high).loss.sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), float(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # inside the clip range the loss is -ratio * A, and so is its gradient
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # a good token that is likelier already, beyond 1 + 0.3: held at 1.3, no gradient
        (1.5, 2.0, -2.6, 0.0),
        # a bad token that is less likely already, below 1 - 0.2: held at 0.8, no gradient
        (0.5, -2.0, 1.6, 0.0),
        # moved the wrong way: not clipped, however far
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_hand_worked_cases(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found = loss_and_gradient(math.log(ratio), advantage)
    assert found == pytest.approx((loss, gradient), rel=1e-5)


def test_clipped_says_where_the_gradient_was_taken_away() -> None:
    logprobs = tensor(*(math.log(r) for r in (1.0, 1.5, 0.5, 0.5, 1.5, 1.25)))
    advantages = tensor(1, 1, -1, 1, -1, 1)
    found = clipped_policy_gradient(logprobs, torch.zeros(6), advantages, 0.2, 0.3)
    assert found.clipped.tolist() == [False, True, True, False, False, False]
    assert found.ratio.tolist() == pytest.approx([1.0, 1.5, 0.5, 0.5, 1.5, 1.25])
    assert not found.ratio.requires_grad


def test_against_itself_the_ratio_is_exactly_1_and_the_gradient_that_of_reinforce() -> None:
    logprobs = tensor(-0.123, -7.7, -33.0).requires_grad_()
    advantages = tensor(0.7, -1.3, 2.0)
    found = clipped_policy_gradient(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
    assert found.ratio.tolist() == [1.0, 1.0, 1.0]
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == (-advantages).tolist()


@given(
    log_ratio=st.floats(-1, 1).filter(lambda x: min(abs(x - math.log(0.8)), abs(x - math.log(1.3))) > 0.02),
    advantage=st.floats(-3, 3),
)
def test_the_gradient_agrees_with_finite_differences(log_ratio: float, advantage: float) -> None:
    def exact(x: float) -> float:
        ratio = math.exp(x)
        return -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)

    step = 1e-4
    slope = (exact(log_ratio + step) - exact(log_ratio - step)) / (2 * step)
    loss, gradient = loss_and_gradient(log_ratio, advantage)
    assert loss == pytest.approx(exact(log_ratio), rel=1e-4, abs=1e-5)
    assert gradient == pytest.approx(slope, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("log_ratio", [-200.0, -50.0, 50.0, 200.0])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_extreme_ratios_are_finite_and_get_no_gradient(log_ratio: float, advantage: float) -> None:
    loss, gradient = loss_and_gradient(log_ratio, advantage)
    assert math.isfinite(loss)
    assert gradient == 0.0
    worst = clipped_policy_gradient(tensor(log_ratio), tensor(0.0), tensor(advantage), 0.2, 0.2)
    assert float(worst.ratio) == pytest.approx(math.exp(math.copysign(20, log_ratio)), rel=1e-5)


def test_bfloat16_comes_out_as_float32() -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert clipped_policy_gradient(logprobs, logprobs, logprobs, 0.2, 0.2).loss.dtype == torch.float32


def test_shapes_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[N\] alike, found \(2,\), \(2,\), \(1,\)"):
        clipped_policy_gradient(tensor(1, 2), tensor(1, 2), tensor(1), 0.2, 0.2)


def test_dual_clipping_bounds_what_a_bad_token_is_pushed_down() -> None:
    logprobs = tensor(*(math.log(r) for r in (5.0, 2.0, 5.0, 0.5))).requires_grad_()
    advantages = tensor(-1, -1, 1, -1)
    found = clipped_policy_gradient(logprobs, torch.zeros(4), advantages, 0.2, 0.3, clip_dual=3.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert found.loss.tolist() == pytest.approx([3.0, 2.0, -1.3, 0.8])
    assert gradient.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0])
    assert found.clipped_low.tolist() == [True, False, False, True]
    assert found.clipped_high.tolist() == [False, False, True, False]


# Two sequences of 3 and 2 tokens; the second token of the first is not the model's.
LENGTHS = torch.tensor([3, 2])
MASK = torch.tensor([True, False, True, True, True])
OLD = tensor(-1.0, 0.0, -1.0, -2.0, -2.0)
NEW = tensor(-0.7, 9.0, -1.1, -2.4, -2.0)  # log-ratios .3 and -.1, mean .1; -.4 and 0, mean -.2


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    found = sequence_ratio(NEW, OLD, MASK, LENGTHS)
    assert found.tolist() == pytest.approx([math.exp(0.1)] * 3 + [math.exp(-0.2)] * 2)


def test_the_ratio_of_whole_sequences_is_the_product() -> None:
    logprobs = NEW.clone().requires_grad_()
    found = sequence_ratio(logprobs, OLD, MASK, LENGTHS, product=True)
    assert found.tolist() == pytest.approx([math.exp(0.2)] * 3 + [math.exp(-0.4)] * 2)
    (gradient,) = torch.autograd.grad(found[0] + found[3], logprobs)
    assert gradient.tolist() == pytest.approx([math.exp(0.2), 0, math.exp(0.2), math.exp(-0.4), math.exp(-0.4)])


@pytest.mark.parametrize("per_token", [False, True])
def test_both_forms_of_gspo_have_the_gradient_of_the_paper(per_token: bool) -> None:
    logprobs = NEW.clone().requires_grad_()
    ratio = sequence_ratio(logprobs, OLD, MASK, LENGTHS, per_token)
    advantages = tensor(2.0, 2.0, 2.0, -3.0, -3.0)
    loss = torch.where(MASK, clip_ratio(ratio, advantages, 0.5, 0.5).loss, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    # equation 9: s * A / |y| for each token, here times the 2 tokens that the sum counts it for
    expected = [-2 * math.exp(0.1), 0.0, -2 * math.exp(0.1), 3 * math.exp(-0.2), 3 * math.exp(-0.2)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5)


def test_gspo_per_token_gives_each_token_its_own_advantage() -> None:
    logprobs = NEW.clone().requires_grad_()
    ratio = sequence_ratio(logprobs, OLD, MASK, LENGTHS, per_token=True)
    (gradient,) = torch.autograd.grad((ratio * tensor(1.0, 0.0, 5.0, 0.0, 1.0)).sum(), logprobs)
    assert gradient.tolist() == pytest.approx([math.exp(0.1), 0, 5 * math.exp(0.1), 0, math.exp(-0.2)], rel=1e-5)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs = tensor(*(math.log(r) for r in (0.05, 0.9, 1.1, 8.0))).requires_grad_()
    advantages = tensor(1.0, -2.0, 1.0, 1.0)
    found = cispo(logprobs, torch.zeros(4), advantages, clip_low=0.8, clip_high=1.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.2, 1.8, -1.1, -2.0], rel=1e-5)
    weights = [0.2, 0.9, 1.1, 2.0]
    expected = [-w * a * p for w, a, p in zip(weights, advantages.tolist(), logprobs.tolist(), strict=True)]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.clipped_low.tolist() == [True, False, False, False]
    assert found.clipped_high.tolist() == [False, False, False, True]


@pytest.mark.parametrize(("most", "weights"), [(None, [1.0, 1.0]), (2.0, [0.5, 2.0]), (10.0, [0.5, 8.0])])
def test_reinforce_weighs_stale_samples(most: float | None, weights: list[float]) -> None:
    logprobs = tensor(math.log(0.5) - 1, math.log(8.0) - 3).requires_grad_()
    found = reinforce(logprobs, tensor(-1.0, -3.0), tensor(3.0, -1.0), most)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-3 * weights[0], weights[1]], rel=1e-5)
    assert found.ratio.tolist() == pytest.approx([0.5, 8.0], rel=1e-5)


@given(scale=st.floats(0.01, 10), seed=st.integers(0, 1000))
def test_every_loss_is_proportional_to_its_advantages(scale: float, seed: int) -> None:
    """So an importance weight may multiply the advantage instead of the loss."""
    make = torch.Generator().manual_seed(seed)
    logprobs, old = -torch.rand(5, generator=make), -torch.rand(5, generator=make)
    advantages = torch.randn(5, generator=make)
    ratio = sequence_ratio(logprobs, old, MASK, LENGTHS)
    for loss in (
        lambda a: clipped_policy_gradient(logprobs, old, a, 0.2, 0.3, 3.0),
        lambda a: clip_ratio(ratio, a, 0.01, 0.02),
        lambda a: cispo(logprobs, old, a, 0.2, 0.3),
        lambda a: reinforce(logprobs, old, a, 2.0),
        lambda a: sapo(logprobs, old, a),
        lambda a: gmpo(logprobs, old, a, MASK, LENGTHS),
        lambda a: vespo(logprobs, old, a, MASK, LENGTHS),
        lambda a: dppo(logprobs, old, a, "tv", 0.05, 0.05),
        lambda a: dppo(logprobs, old, a, "kl", 0.05, 0.05, None),
    ):
        torch.testing.assert_close(loss(advantages * scale).loss, loss(advantages).loss * scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", [-math.inf, -51.0, -0.5])
@pytest.mark.parametrize("own", [-math.inf, -51.0, -0.5])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_tokens_that_cannot_occur_leave_every_loss_finite(own: float, other: float, advantage: float) -> None:
    old, advantages, mask, lengths = tensor(other), tensor(advantage), torch.tensor([True]), torch.tensor([1])
    for loss in (
        lambda p: clipped_policy_gradient(p, old, advantages, 0.2, 0.2, 3.0),
        lambda p: clip_ratio(sequence_ratio(p, old, mask, lengths), advantages, 0.2, 0.2),
        lambda p: cispo(p, old, advantages, 1.0, 4.0),
        lambda p: reinforce(p, old, advantages, 2.0),
        lambda p: reinforce(p, old, advantages),
        lambda p: sapo(p, old, advantages),
        lambda p: gmpo(p, old, advantages, mask, lengths),
        lambda p: vespo(p, old, advantages, mask, lengths),
        lambda p: vespo(p, old, advantages, mask, lengths, (9.0, 9.0), (0.1, 0.1), 0.0),
        lambda p: dppo(p, old, advantages, "tv"),
        lambda p: dppo(p, old, advantages, "kl", max_weight=None, limit=0.0),
    ):
        logprobs = tensor(own).requires_grad_()
        found = loss(logprobs)
        (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs, allow_unused=True)
        assert torch.isfinite(found.loss).all()
        assert torch.isfinite(found.ratio).all()
        assert gradient is None or torch.isfinite(gradient).all()


def test_a_sequences_ratio_is_clamped_after_the_mean_and_not_before() -> None:
    """One token is 35 nats away and four are not: 7 nats on average."""
    logprobs = tensor(0.0, -1.0, -1.0, -1.0, -1.0, -1.0).requires_grad_()
    old = tensor(0.0, -1.0, -1.0, -1.0, -1.0, -36.0)
    mask, lengths = torch.arange(6) > 0, torch.tensor([6])
    ratio = sequence_ratio(logprobs, old, mask, lengths)
    assert ratio.tolist() == pytest.approx([math.exp(7)] * 6, rel=1e-5)
    (gradient,) = torch.autograd.grad(ratio[0], logprobs)
    assert gradient.tolist() == pytest.approx([0.0, *[math.exp(7) / 5] * 5], rel=1e-5)
    whole = sequence_ratio(logprobs, old - 0.0, mask, lengths, product=True)
    assert whole.tolist() == pytest.approx([math.exp(20)] * 6, rel=1e-5)
    assert not torch.autograd.grad(whole[0], logprobs)[0].any()
    free = sequence_ratio(logprobs, old, mask, lengths, product=True, limit=0.0)
    assert free.tolist() == pytest.approx([math.exp(35)] * 6, rel=1e-4)


@pytest.mark.parametrize("per_token", [False, True])
def test_opposite_tokens_cancel_before_the_clamp(per_token: bool) -> None:
    logprobs, old = tensor(-1.0, -31.0).requires_grad_(), tensor(-31.0, -1.0)
    ratio = sequence_ratio(logprobs, old, torch.tensor([True, True]), torch.tensor([2]), per_token)
    assert ratio.tolist() == [1.0, 1.0]
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([1.0, 1.0])


def test_the_soft_gate_of_sapo_is_worked_by_hand() -> None:
    """At a ratio of 1 the gradient is that of the policy gradient; at 3, with temperature 1, it is 3 * 4p(1 - p)."""
    logprobs = tensor(-1.0, math.log(3.0) - 1, -1.0).requires_grad_()
    found = sapo(logprobs, tensor(-1.0, -1.0, -1.0), tensor(2.0, 2.0, -2.0), 1.0, 4.0)
    assert found.loss.tolist() == pytest.approx([-4.0, -8 / (1 + math.exp(-2)), 1.0], rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    p = 1 / (1 + math.exp(-2))
    assert gradient.tolist() == pytest.approx([-2.0, -2 * 3 * 4 * p * (1 - p), 2.0], rel=1e-5)
    assert not found.clipped.any()


def test_the_geometric_mean_of_gmpo_is_worked_by_hand() -> None:
    """A good response's token at 1 nat counts as 0.4, one at -1 as it is: a mean of -0.3. A bad one's the other way."""
    change, old = [1.0, -1.0, 1.0, -1.0], tensor(-3.0, -3.0, -3.0, -3.0)
    logprobs = tensor(*(c - 3 for c in change)).requires_grad_()
    mask, lengths = torch.ones(4, dtype=torch.bool), torch.tensor([2, 2])
    found = gmpo(logprobs, old, tensor(2.0, 2.0, -2.0, -2.0), mask, lengths, 0.4, 0.4)
    good, bad = math.exp(-0.3), math.exp(0.3)
    assert found.loss.tolist() == pytest.approx([-2 * good, -2 * good, 2 * bad, 2 * bad], rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss.sum() / 2, logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -good, bad, 0.0], rel=1e-5)
    assert found.clipped_high.tolist() == [True, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True]


def test_the_weight_of_vespo_is_worked_by_hand() -> None:
    """Ratios of 1.25 and 1.6 make 2 for the good response, .5 and .5 make .25 for the bad one."""
    ratios = (1.25, 1.6, 0.5, 0.5)
    logprobs = tensor(*(math.log(r) - 2 for r in ratios)).requires_grad_()
    mask, lengths = torch.ones(4, dtype=torch.bool), torch.tensor([2, 2])
    found = vespo(logprobs, tensor(-2, -2, -2, -2), tensor(3.0, 3.0, -1.0, -1.0), mask, lengths)
    good, bad = 2**2 * math.exp(3 * (1 - 2)), 0.25**3 * math.exp(2 * (1 - 0.25))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-3 * good, -3 * good, bad, bad], rel=1e-5)
    assert found.ratio.tolist() == pytest.approx([2, 2, 0.25, 0.25], rel=1e-5)
    assert not found.clipped.any()


def test_on_policy_vespo_and_dppo_are_reinforce() -> None:
    logprobs, advantages = tensor(-0.5, 0.0, -1.0, -2.0, -0.1).requires_grad_(), tensor(1.0, 1.0, 1.0, -2.0, -2.0)
    old = logprobs.detach()
    expected = -advantages * logprobs
    for found in (vespo(logprobs, old, advantages, MASK, LENGTHS), dppo(logprobs, old, advantages)):
        torch.testing.assert_close(found.loss, expected)
        slopes = (torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)[0] for loss in (found.loss, expected))
        torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.1), ("kl", 0.02)])
def test_the_trust_region_of_dppo_is_worked_by_hand(divergence: Any, bound: float) -> None:
    """A rare token may become ten times as likely; a frequent one may not change by 0.2, towards its advantage."""
    old, new = tensor(0.001, 0.5, 0.5, 0.7, 0.7, 0.5), tensor(0.01, 0.7, 0.3, 0.5, 0.9, 0.55)
    advantages = tensor(1, 1, 1, -1, -1, 1)
    logprobs = new.log().requires_grad_()
    found = dppo(logprobs, old.log(), advantages, divergence, bound, bound, max_weight=5.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-5.0, 0.0, -0.6, 0.0, 0.9 / 0.7, -1.1], rel=1e-5)
    assert found.clipped_high.tolist() == [False, True, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False, False]


def test_only_bad_responses_that_have_become_unlikely_are_masked() -> None:
    new, sampled = tensor(-2.0, -1.0, -2.0, -1.0, -1.0, -1.0), tensor(-1.0, -1.0, -1.0, -1.0, -1.0, -1.0)
    advantages, lengths = tensor(-1.0, -1.0, 1.0, 1.0, -1.0, -1.0), torch.tensor([2, 2, 2])
    mask = torch.ones(6, dtype=torch.bool)
    kept = near_policy(new, sampled, advantages, mask, lengths, 0.4)
    assert kept.tolist() == [False, False, True, True, True, True]
    assert near_policy(new, sampled, advantages, mask, lengths, 0.5).all()
