import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from whet.ops.losses import clipped_policy_gradient


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
