"""Weights of the trainer in this process, with which the generator computes in place.

    trainer's memory    W                    never copied, never changed here
    of the generator    modules around W     built without memory, in the mode of inference
                        A, s B               a copy, new in each weight sync of an adapter

    linear layer        y = W x + s B (A x)
    stacked experts     W + s B A, for the time of one layer

What the trainer does to its own modules is not seen here.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.errors import ConfigError, WhetError
from whet.interfaces.weights import TransferSpec
from whet_hf.layers import ADAPTER
from whet_weights import lent
from whet_weights.offload import trim

Pair = tuple[Tensor, Tensor]


class SharedWeights:
    """The weights that the backend of this process lends."""

    asleep = False
    """They are in memory whenever the generator wakes: the backend keeps them there."""

    def __init__(self, path: str, dtype: str, device: str, trust_remote_code: bool) -> None:
        """Borrow the weights. Raises `WhetError` if there are none, or those of another model."""
        self._lent = lent.borrow(lent.TRANSFORMERS)
        try:
            self.model = model_around(self._lent.held.named, path, dtype, device, trust_remote_code)
        except BaseException:
            self.close()
            raise
        self._adapter = Adapter(self.model)

    @torch.no_grad()
    def take(self, spec: TransferSpec, receiver: int) -> bool:
        """Copy the adapter that the trainer has handed over, if it trains one. Return that the model has it now."""
        self._lent.taken(spec)
        held = self._lent.held
        if held.adapter is not None:
            self._adapter.use(held.adapter(spec.weights) or {}, held.scaling)
        return True

    def sleep(self) -> int:
        """Release cached memory. Return 0: the weights are the trainer's."""
        trim()
        return 0

    def wake(self) -> None:
        """Do nothing: the weights are there."""

    def apply_held(self) -> bool:
        """Return that no adapter waits."""
        return False

    def close(self) -> None:
        """Return the weights to the backend."""
        self._lent.borrowed = False


class Adapter:
    """An adapter beside the weights of a model. Hooks on its modules add it. The fused decoder reads it by itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[RemovableHandle] = []

    def use(self, pairs: Mapping[str, Pair], scaling: float) -> None:
        """Compute with these A and B, by the name of the weight, in the place of those before.

        A [r, in] and B [out, r], or stacked [E, r, in] and [E, out, r]. They are copied in the dtype of the weight.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for each in self._model.modules():
            vars(each).pop(ADAPTER, None)
        for name, (a, b) in pairs.items():
            module, _, own = name.rpartition(".")
            target = self._model.get_submodule(module)
            weight = target.get_parameter(own)
            first = a.detach().to(weight.device, weight.dtype, copy=True)
            if weight.ndim == 2:
                scaled = (b.detach() * scaling).to(weight.device, weight.dtype)
                setattr(target, ADAPTER, (first, scaled))
                self._hooks.append(target.register_forward_hook(_add))
            else:
                second = b.detach().to(weight.device, weight.dtype, copy=True)
                if getattr(target, "is_transposed", False):
                    first, second = second.mT, first.mT
                place = partial(_place, own, second, first, scaling)
                self._hooks.append(target.register_forward_pre_hook(place))
                self._hooks.append(target.register_forward_hook(partial(_restore, own), always_call=True))


def _add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    a, b = vars(module)[ADAPTER]
    return output + F.linear(F.linear(inputs[0], a), b)


def _place(own: str, left: Tensor, right: Tensor, scaling: float, module: nn.Module, inputs: Any) -> None:
    """Put W + s B A before the module's own parameter, where its forward pass finds it."""
    vars(module)[own] = torch.baddbmm(module._parameters[own], left, right, alpha=scaling)  # type: ignore[arg-type]


def _restore(own: str, module: nn.Module, inputs: Any, output: Any) -> None:
    vars(module).pop(own, None)


def model_around(named: Mapping[str, Tensor], path: str, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Return the model of a folder whose parameters and buffers are these tensors. No weight is read or copied.

    Raises `ConfigError` if the tensors are on another device, and `WhetError` if they are of another model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    found = sorted({str(tensor.device) for tensor in named.values()})
    if found != [str(torch.device(device))]:
        raise ConfigError(
            f"generator.weights is shared, and the backend's weights are on {', '.join(found)}, the generator's device "
            f"is {device}; give both the same devices (cluster.gpus), or set generator.weights: own"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    odd = sorted(own.keys() ^ named.keys()) or [name for name in own if own[name].shape != named[name].shape]
    if odd:
        raise WhetError(
            f"generator.weights is shared, and the backend's weights are not those of {type(model).__name__} in "
            f"{path}: they differ in {odd[0]}; set generator.weights: own"
        )
    made = dict[int, nn.Parameter]()  # tied ones stay one
    for name, tensor in named.items():
        module, _, attribute = name.rpartition(".")
        holder = model.get_submodule(module)
        if attribute in holder._parameters:
            made.setdefault(id(tensor), nn.Parameter(tensor.detach(), requires_grad=False))
            holder._parameters[attribute] = made[id(tensor)]
        else:
            holder._buffers[attribute] = tensor.detach()
    return model.eval()
