"""RMS norms in a few passes over memory instead of about twenty.

Small models on a CPU spend more time in element-wise operations than in matrix products. The largest of these costs is
autograd's backward pass of a norm that is written in single operations. The gradient written by hand takes a third of
the time.
"""

from typing import Any

import torch
from torch import Tensor, nn

from whet_fsdp2.sharding import full


def hasten_norms(model: nn.Module) -> int:
    """Replace the forward pass of RMS norms by a faster one, equal up to rounding. Returns the number of norms.

    A module counts as an RMS norm if its class has that name and its output equals the formula. The faster pass is used
    for float32 on a CPU only; other inputs use the module's own forward pass.
    """
    found = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = _Hastened(module, module.forward)
            found += 1
    return found


def _is_plain(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or len(list(module.parameters())) != 1:
        return False
    with torch.no_grad():
        whole = full(weight.detach())
        probe = torch.linspace(-2, 3, 4 * len(whole)).view(4, -1)
        ours = _rms_norm(probe, whole, eps)
        module._parameters["weight"] = nn.Parameter(whole)  # a sharded one only computes within its layer
        try:
            same: bool = torch.allclose(module.forward(probe), ours, atol=1e-6, rtol=1e-5)
        finally:
            module._parameters["weight"] = weight
        return same


class _Hastened:
    """The faster forward pass of one RMS norm."""

    def __init__(self, module: Any, slow: Any) -> None:
        self._module, self._slow = module, slow

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self._module.weight
        if hidden.dtype != torch.float32 or weight.dtype != torch.float32 or hidden.device.type != "cpu":
            slow: Tensor = self._slow(hidden)
            return slow
        return _rms_norm(hidden, weight, self._module.variance_epsilon)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch's own
    return normed


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Zhang and Sennrich 2019 (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = size.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        (upstream,) = gradients
        product = upstream * unit
        to_weight = product.reshape(-1, product.shape[-1]).sum(0)
        # dx = scale (g w - unit mean(g w unit))
        pull = torch.matmul(product, weight)[..., None].mul_(-1 / unit.shape[-1])
        return torch.addcmul(upstream * weight, unit, pull).mul_(scale), to_weight, None
