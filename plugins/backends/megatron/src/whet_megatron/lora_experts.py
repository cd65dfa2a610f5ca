"""The forward passes of experts with LoRA adapters: W_e x + s B_e (A_e x), where tokens x of expert e.

Tensor parallel ranks of an expert see the same tokens, and what each of them computes is added up after the experts. So
nothing is exchanged here, and the half of an adapter that every one of these ranks has, gets a part of its gradient on
each of them: the backward pass adds these parts up.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whet_megatron.lora_layers import Chosen
from whet_megatron.lora_split import ExpertSplit
from whet_training.lora import Pair
from whet_weights import adapter as peft


class Stack:
    """The adapter of a stacked weight: a pair of matrices for each expert of this rank."""

    def __init__(self, adapters: Chosen, weight: str, split: ExpertSplit) -> None:
        self._adapters, self._weight, self._split = adapters, weight, split

    def pair(self, number: int) -> Pair | None:
        """Return A [r, in] and B [out, r] of an expert, counted on this rank. None: it has no adapter now."""
        pair = self._adapters.at(self._weight)
        return None if pair is None else (pair[0][number], pair[1][number].flatten(0, 1))

    def computing(self, dtype: torch.dtype) -> list[Pair] | None:
        """Return A and scaled B of each expert of this rank, for its tokens. None: they have no adapter now."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import mappings

        pair = self._adapters.at(self._weight)
        if pair is None:
            return None
        group, halves = parallel_state.get_expert_tensor_parallel_group(), list[Tensor]()
        for half, end in zip(pair, (peft.A, peft.B), strict=True):
            whole = self._split.axis(end) is None
            halves.append(mappings.copy_to_tensor_model_parallel_region(half, group=group) if whole else half)
        a, b = halves
        scaled = b.flatten(1, 2) * self._adapters.scaling
        return list(zip(a.to(dtype).unbind(), scaled.to(dtype).unbind(), strict=True))


class GroupedForward:
    """The forward pass of a layer with the matrices of all experts of this rank."""

    def __init__(self, linear: Any, stack: Stack) -> None:
        self._inner, self._stack = linear.forward, stack

    def __call__(self, x: Tensor, tokens: list[int], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the layer's result, and the bias that it leaves to be added. `tokens`: of each expert in turn."""
        y, bias = self._inner(x, tokens, *args, **kwargs)
        if (pairs := self._stack.computing(x.dtype)) is None:
            return y, bias
        parts = zip(torch.split(x, tokens), pairs, strict=True)
        return y + torch.cat([_update(part, pair) for part, pair in parts]), bias


class SequentialForward:
    """The forward pass of experts that are computed one after the other."""

    def __init__(self, experts: Any, stacks: Mapping[str, Stack]) -> None:
        self._inner, self._stacks = experts.forward, stacks
        self.pairs: dict[str, list[Pair] | None] = {}
        """Of the pass that is computed, by the name of the layer: pairs of all experts of this rank."""
        for name in stacks:
            for number, expert in enumerate(experts.local_experts):
                linear = getattr(expert, name)
                linear.forward = _OfExpert(self, name, number, linear.forward)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the experts return."""
        self.pairs = {name: stack.computing(hidden.dtype) for name, stack in self._stacks.items()}
        try:
            return self._inner(hidden, *args, **kwargs)
        finally:
            self.pairs = {}


class _OfExpert:
    """The forward pass of a layer of one expert."""

    def __init__(self, of: SequentialForward, name: str, number: int, inner: Any) -> None:
        self._of, self._name, self._number, self._inner = of, name, number, inner

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        y, bias = self._inner(x, *args, **kwargs)
        pairs = self._of.pairs[self._name]
        return (y if pairs is None else y + _update(x, pairs[self._number])), bias


def _update(x: Tensor, pair: Pair) -> Tensor:
    a, b = pair
    return F.linear(F.linear(x, a), b)


def adapt(experts: Any, stacks: Mapping[str, Stack]) -> None:
    """Make Megatron's experts of a layer compute with adapters, by the names of their linear layers."""
    if hasattr(experts, "local_experts"):
        experts.forward = SequentialForward(experts, stacks)
        return
    for name, stack in stacks.items():
        linear = getattr(experts, name)
        linear.forward = GroupedForward(linear, stack)
