"""The forward passes of Megatron's linear layers with LoRA adapters, and the adapted layers of a model by name.

column parallel    y_i = W_i x + s B_i g(A x)        rank i has rows of W and of B; every rank has A
row parallel       y = sum_i W_i x_i + s B r(A_i x_i)    rank i has columns of W and of A; every rank has B

Several stored weights are one layer of Megatron: queries, keys and values, gate and up. Each has an A and a B of its
own, so their A are stacked, and their B are the blocks of one matrix whose rows are in the order of the layer.

What ranks exchange has the size of the adapter's rank. Without sequence parallelism, g passes on and adds up gradients
over the tensor parallel ranks, and r adds up: then the half that every rank has, has the same gradient everywhere. With
it, g gathers the tokens of all ranks and r leaves each rank its tokens: then that half has on each rank the gradient of
the rank's own tokens, and the sum over the ranks is whole. Megatron adds it up if the parameter says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet_training.lora import Pair


class Chosen(Protocol):
    """The adapters with which a model computes."""

    scaling: float

    def at(self, weight: str) -> Pair | None:
        """Return the adapter of a weight, as this rank has it. None: the model computes without adapters."""


def _tensor_group() -> Any:
    """Return the tensor parallel ranks. Megatron is imported late, after the check that it can be."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


class AdaptedForward(ABC):
    """The forward pass of a linear layer, with W x + s B (A x) in the place of W x."""

    exchanges: tuple[str, str]
    """Megatron's functions that bring A x to where B is: without and with sequence parallelism."""

    def __init__(self, adapters: Chosen, linear: Any) -> None:
        self._adapters, self._linear, self._inner = adapters, linear, linear.forward
        self._group = _tensor_group()

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the layer's result, and the bias that it leaves to be added."""
        y, bias = self._inner(x, *args, **kwargs)
        if (pair := self.pair()) is None:
            return y, bias
        from megatron.core.tensor_parallel import mappings

        a, b = pair
        exchange = getattr(mappings, self.exchanges[self._linear.config.sequence_parallel])
        hidden = exchange(F.linear(self._read(x), a.to(x.dtype)), group=self._group)
        return y + F.linear(hidden, (b * self._adapters.scaling).to(x.dtype)), bias

    @abstractmethod
    def pair(self) -> Pair | None:
        """Return the A and B of the layer. None: it has no adapter now."""

    def _read(self, x: Tensor) -> Tensor:
        """Return what A multiplies with: the input, after the norm of the layer where it has one."""
        weight = getattr(self._linear, "layer_norm_weight", None)
        if weight is None:
            return x
        return F.rms_norm(x, x.shape[-1:], weight, self._linear.config.layernorm_epsilon)


class ColumnForward(AdaptedForward):
    """The forward pass of a column parallel layer."""

    exchanges = "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region"

    def __init__(
        self, adapters: Chosen, linear: Any, parts: Sequence[tuple[str, int]], adapted: set[str], order: Tensor,
    ) -> None:  # fmt: skip
        """`parts`: the stored weights of the layer, each with this rank's number of rows. `adapted`: those that have an
        adapter. `order`: [rows] for each row of the layer its place among the rows of the parts.
        """
        super().__init__(adapters, linear)
        self._parts, self._adapted, self._order = parts, adapted, order

    def pair(self) -> Pair | None:
        """Return A [sum of ranks, in] and B [rows, sum of ranks] of the layer. None: it has no adapter now."""
        pairs = {name: self._adapters.at(name) for name, _ in self._parts if name in self._adapted}
        halves = [pair[0] for pair in pairs.values() if pair is not None]
        if not halves:
            return None
        a = torch.cat(halves)
        blocks = [pair[1] if (pair := pairs.get(name)) else a.new_zeros(rows, 0) for name, rows in self._parts]
        whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]  # torch has no types for it
        return a, whole.index_select(0, self._order)


class RowForward(AdaptedForward):
    """The forward pass of a row parallel layer."""

    exchanges = "reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"

    def __init__(self, adapters: Chosen, linear: Any, name: str) -> None:
        super().__init__(adapters, linear)
        self._name = name

    def pair(self) -> Pair | None:
        """Return the A and B of the layer. None: it has no adapter now."""
        return self._adapters.at(self._name)


def with_gradient(embedding: nn.Module) -> None:
    """Make what an embedding returns require a gradient.

    All before the first adapter is frozen. But a pipeline asks each stage for a gradient, and layers that are
    recomputed have one only if their input has.
    """

    def require(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.requires_grad_()

    embedding.register_forward_hook(require)
