"""Experts that compute tokens sorted by expert, with a backward pass that gathers instead of accumulating.

`transformers` indexes the tokens to sort them, and back. The gradient of an index is an `index_put` that adds up, since
autograd does not know that each token is taken as often as it has experts. Here it is known: the gradient of a token is
the sum over its experts, in the order in which the router chose them. So it is the same on every run.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet_fsdp2.sharding import is_wrapped

log = logging.getLogger(__name__)

NAME = "whet_sorted"
"""The name in the interface of `transformers`."""


def hasten_experts(model: Any, difference: Callable[[], float], tolerance: float) -> bool:
    """Replace the forward pass of a model's experts, if the `difference` of its outputs is within the tolerance then.

    Models without stacked experts stay as they are, and so do experts that are split over ranks.
    """
    experts = [one for one in model.modules() if hasattr(one, "has_gate")]  # `use_experts_implementation` sets it
    if not experts or not all(map(_fits, experts)):
        return False
    if model.config.get_text_config()._experts_implementation != "grouped_mm":
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
    model.set_experts_implementation(NAME)
    try:
        off = difference()
        problem = "" if off <= tolerance else f"its outputs differ by {off:.2g}"
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # raised by the model's own code
        problem = f"{type(error).__name__}: {error}"
    if problem:
        model.set_experts_implementation("grouped_mm")
        log.warning("experts of %s compute as transformers does, not sorted: %s", type(model).__name__, problem)
    return not problem


def _fits(module: Any) -> bool:
    """Return whether stacked experts are all on this rank, and have nothing that is not computed here."""
    odd = ("has_bias", "has_post_expert_norm", "_is_expert_parallel")
    return bool(module.has_gate and not is_wrapped(module) and not any(getattr(module, name, False) for name in odd))


def compute_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs [T, H].

    module: has the stacked weights. hidden [T, H]; chosen [T, k]: the experts of each token; weights [T, k].
    """
    from transformers.integrations.moe import _grouped_linear

    experts, order = torch.sort(chosen.reshape(-1), stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(module.num_experts, device=order.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    rows = _Sorted.apply(hidden, order // chosen.shape[1], place)  # type: ignore[no-untyped-call]  # torch's own
    inner = module._apply_gate(_grouped_linear(rows, module.gate_up_proj, ends, is_transposed=module.is_transposed))
    outer = _grouped_linear(inner, module.down_proj, ends, is_transposed=module.is_transposed)
    back: Tensor = _Permuted.apply(outer, place, order)  # type: ignore[no-untyped-call]  # torch's own
    return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)


class _Sorted(torch.autograd.Function):
    """Rows of x [T, H], each of them k times: [T k, H]. place [T k]: where the copies of each row are, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        (upstream,) = gradients
        return upstream.index_select(0, place).view(ctx.count, -1, upstream.shape[-1]).sum(1), None, None


class _Permuted(torch.autograd.Function):
    """Rows of x [N, H] in the order `there` [N]; `back` [N] is the inverse order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None
