"""The forward passes of layers with LoRA adapters: whole layers, and slices of them under tensor or expert parallelism.

split by outputs    y_i = W_i x + s B_i (A x)      rank i has rows of W, and computes with the same rows of B
split by inputs     y = sum_i W_i x_i + s B (A_i x_i)      columns of W, and the same columns of A
split by experts    W_e + s B_e A_e of the experts e that the rank has
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from whet_fsdp2.sharding import is_wrapped
from whet_training.lora import Pair


class Chosen(Protocol):
    """The adapters with which a model computes."""

    scaling: float

    def at(self, weight: str) -> Pair | None:
        """Return the adapter of a weight. None: the model computes without adapters."""


@frozen(eq=False)
class Slice:
    """The part of a weight that this rank holds."""

    side: str
    """`out`, `in` or `experts`: the dimension of the weight that is split."""
    index: Tensor
    """The rows, columns or experts of this rank."""
    ranks: int
    """The number of ranks that share the weight."""

    def of(self, a: Tensor, b: Tensor) -> Pair:
        """Return the parts of A and B that belong to this part of the weight."""
        if self.side == "out":
            return a, b.index_select(-2, self.index)
        if self.side == "in":
            return a.index_select(-1, self.index), b
        return a.index_select(0, self.index), b.index_select(0, self.index)


def slice_of(weight: Any, *, transposed: bool = False) -> Slice | None:
    """Return the part of a weight that tensor or expert parallelism has left on this rank. None: the whole weight.

    FSDP2 does not count: it gathers a weight before it is used.
    """
    if not isinstance(weight, DTensor):
        return None
    mesh, placements = weight.device_mesh, weight.placements
    placement: Any
    for name, placement in zip(mesh.mesh_dim_names or (), placements, strict=False):
        if name in ("tp", "ep") and hasattr(placement, "dim"):  # a strided shard does not count as a shard
            dim, ndim = placement.dim % weight.ndim, weight.ndim
            whole = torch.arange(weight.shape[dim], device=mesh.device_type)
            factor = getattr(placement, "split_factor", None)  # two matrices in one, each of them split
            own = Shard(0) if factor is None else type(placement)(dim=0, split_factor=factor)
            sub = mesh[name] if mesh.ndim > 1 else mesh
            index = distribute_tensor(whole, sub, [own], src_data_rank=None).to_local()
            inner = ("in", "out") if transposed else ("out", "in")
            return Slice((*["experts"] * (ndim - 2), *inner)[dim], index, sub.size())
    return None


class LinearForward:
    """The forward pass of a linear layer with its adapter."""

    def __init__(self, adapters: Chosen, name: str, part: Slice | None, inner: Callable[[Any], Any]) -> None:
        self._adapters, self._name, self._part, self._inner = adapters, name, part, inner

    def __call__(self, x: Tensor) -> Tensor:
        """Return W x + bias + s B (A x). x [..., in] -> [..., out]."""
        y: Tensor = self._inner(x)
        pair = self._adapters.at(self._name)
        if pair is None:
            return y
        a, b = pair if self._part is None else self._part.of(*pair)
        if self._part is None or not (isinstance(x, DTensor) and isinstance(y, DTensor)):
            return y + self._update(x, a, b)
        # Each rank has the gradient from its own outputs alone; the sum over ranks is that of x.
        own = x.to_local(grad_placements=[Partial()] if self._part.side == "out" else None)
        part = self._update(own, a, b)
        return y + DTensor.from_local(
            part, y.device_mesh, y.placements, run_check=False, shape=y.shape, stride=y.stride()
        )

    def _update(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a.to(x.dtype)), (b * self._adapters.scaling).to(x.dtype))


class ExpertsForward:
    """The forward pass of an experts module whose stacked weights have adapters."""

    def __init__(
        self, adapters: Chosen, module: nn.Module, names: Mapping[str, str], parts: Mapping[str, Slice | None],
        inner: Callable[..., Any],
    ) -> None:  # fmt: skip
        """`names`: the whole name of each stacked parameter of the module. `parts`: what of it this rank holds."""
        self._adapters, self._module, self._names, self._parts, self._inner = adapters, module, names, parts, inner
        self._transposed = bool(getattr(module, "is_transposed", False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with W + s B A in the place of each W. Arguments are those of the module."""
        placed = {}
        for own, weight in self._names.items():
            pair, part = self._adapters.at(weight), self._parts[own]
            if pair is not None:
                placed[own] = self._sum(self._module._parameters[own], *(pair if part is None else part.of(*pair)))
        vars(self._module).update(placed)  # found before the module's own parameters
        try:
            return self._inner(*args, **kwargs)
        finally:
            for own in placed:
                del vars(self._module)[own]

    def _sum(self, weight: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.to(weight.dtype), b.to(weight.dtype)
        left, right = (a.mT, b.mT) if self._transposed else (b, a)
        return torch.baddbmm(weight, left, right, alpha=self._adapters.scaling)


def wrap(module: Any, make: Callable[[Any], Any]) -> None:
    """Replace a module's forward pass by `make(forward)`.

    Where tensor or expert parallelism of `transformers` has wrapped it, it is replaced inside of the wrapper, which
    prepares the inputs and joins the outputs.
    """
    if not is_wrapped(module):
        module.forward = make(module.forward)
        return
    outer = module.forward
    cells = dict(zip(outer.__code__.co_freevars, outer.__closure__, strict=True))
    if "original_forward" in cells:
        cells["original_forward"].cell_contents = make(cells["original_forward"].cell_contents)
        return
    dispatch = cells["implementation"].cell_contents
    made = make(dispatch.experts_forward)
    for one in (dispatch, *vars(dispatch).values()):
        if hasattr(one, "experts_forward"):
            one.experts_forward = made
