"""Apply a LoRA adapter that comes without its base: W + scaling B A is written into the model's weights.

So a token costs as much as without an adapter. The original values of all weights that an adapter has changed are kept
in the host's memory. Each adapter is added to these values, and not to the weights with the last adapter.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.component import AdapterInfo
from whet.errors import WeightSyncError
from whet_weights.adapter import A, B, merged, pairs, stacked, targets


class Base:
    """The weights of a model without the adapter, as far as adapters have changed them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}
        self._replaced = False
        self._held: tuple[list[tuple[str, Tensor]], AdapterInfo] | None = None

    def forget(self) -> None:
        """Forget the kept weights: the model is getting all weights anew, perhaps with an adapter in them."""
        self._kept.clear()
        self._replaced, self._held = True, None

    def hold(self, tensors: Iterable[tuple[str, Tensor]], info: AdapterInfo) -> None:
        """Copy an adapter to host memory, in place of one that is held, for `apply_held`. Raises `WeightSyncError`."""
        copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
        pairs(copies, info)
        self._held = copies, info

    def apply_held(self) -> bool:
        """Apply the adapter that is held. Return whether there is one."""
        held, self._held = self._held, None
        if held is not None:
            self.apply(*held)
        return held is not None

    @torch.no_grad()
    def apply(self, tensors: Iterable[tuple[str, Tensor]], info: AdapterInfo) -> None:
        """Change the model's weights to those with an adapter. Raises `WeightSyncError` if it is of another model."""
        self._held = None
        found = pairs(tensors, info)
        if self._replaced:
            raise WeightSyncError("an adapter came alone after all weights had come, so its base is not known any more")
        weights = dict(self._model.named_parameters())
        stacks: dict[str, list[str]] = {}
        for name, weight in weights.items():
            if weight.ndim == 3:
                stacks.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
        changed = {}
        for module, name in targets(found, stacks):
            if name not in weights:
                raise WeightSyncError(
                    f"{type(self._model).__name__} has no weight {name}, and an adapter of it was sent"
                )
            a, b, transposed = self._matrices(module, name, weights[name], found[module])
            changed[name] = a, b, transposed
        for name in self._kept.keys() - changed.keys():
            weights[name].copy_(self._kept.pop(name))
        for name, (a, b, transposed) in changed.items():
            weight = weights[name]
            if name not in self._kept:
                self._kept[name] = weight.detach().to("cpu", copy=True)
            base = self._kept[name].to(weight.device)
            weight.copy_(merged(base, a.to(base.device), b.to(base.device), info.scaling, transposed=transposed))

    def _matrices(
        self, module: str, name: str, weight: Tensor, pair: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, bool]:
        a, b, transposed = *pair, False
        if weight.ndim == 3:
            a, b = stacked(module + A, a, len(weight)), stacked(module + B, b, len(weight))
            transposed = bool(getattr(self._model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        shape = (*a.shape[:-2], *((a.shape[-1], b.shape[-2]) if transposed else (b.shape[-2], a.shape[-1])))
        if tuple(weight.shape) != shape:
            raise WeightSyncError(
                f"the adapter of {name} is for the shape {shape}, and the model has {tuple(weight.shape)}"
            )
        return a, b, transposed
