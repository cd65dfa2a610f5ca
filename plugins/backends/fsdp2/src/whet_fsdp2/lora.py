"""LoRA (Hu et al. 2021, arXiv:2106.09685): the model's weights are frozen, and two small matrices a weight are trained.

    linear layer    y = W x + s B (A x)      A [r, in] kaiming uniform, B [out, r] zero
    experts         W_e + s B_e A_e          A [E, r, in], B [E, out, r], added to the weights of all experts at once
    s               alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, arXiv:2312.03732)

A and B are float32 parameters of no module, whole and equal on every rank, so neither FSDP2 nor tensor parallelism
manages them. Each rank computes the gradient of the part that it uses: its batch shard, its rows of B, its columns of
A, its experts. The other parts are zero, so the gradient is the sum over all ranks, whatever the parallelism.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.errors import ConfigError
from whet_fsdp2.lora_layers import ExpertsForward, LinearForward, Slice, slice_of, wrap
from whet_fsdp2.root import AnyRoot
from whet_fsdp2.sharding import full
from whet_fsdp2.weights import PolicyWeights, persistent_buffers
from whet_training.lora import HEAD_WEIGHT, VALUE_HEAD, AdapterSets, Pair, drawn_a, read_start, refuse_others
from whet_training.lora_config import LoraConfig, chosen, matches
from whet_weights import adapter as peft

logger = logging.getLogger(__name__)


class Adapters(AdapterSets):
    """The adapters of a model, and with a value head, the head: everything that is trained."""

    def __init__(self, model: Any, config: LoraConfig, seed: int, head: str = "lm") -> None:
        """Freeze the model, and add an adapter to each target. Call it before layers are sharded or wrapped.

        Raises `ConfigError` if a target matches nothing, or the model has nothing to adapt.
        """
        model.requires_grad_(False)
        super().__init__(config, seed)
        self.slices: dict[str, Slice] = {}
        """The parts of weights that tensor or expert parallelism has left on this rank."""
        self._modules: dict[str, str] = {}
        """The module of PEFT's names, by the name of the weight."""
        self._transposed: set[str] = set()
        self.linears = find_linears(model, config.targets)
        self.experts = find_experts(model) if config.experts else {}
        if config.experts and not self.experts:
            raise ConfigError(f"backend.lora.experts: {type(model).__name__} has no stacked weights of experts")
        if not self.linears and not self.experts:
            raise ConfigError(_nothing_to_adapt(model))
        for name, linear in self.linears.items():
            part = self._add(f"{name}.weight", name, linear.weight)
            wrap(linear, partial(LinearForward, self, f"{name}.weight", part))
        for name, (module, parameters) in self.experts.items():
            depths = [name + peft.WRAPPED * depth for depth in range(len(parameters))]
            transposed = bool(getattr(module, "is_transposed", False))
            parts = {
                weight: self._add(weight, one, getattr(module, weight.rpartition(".")[2]), transposed)
                for one, weight in peft.targets(depths, {name: parameters})
            }
            names = {one: f"{name}.{one}" for one in parameters}
            own = {one: parts[weight] for one, weight in names.items()}
            wrap(module, partial(ExpertsForward, self, module, names, own))
        self.head: nn.Parameter | None = self._free_head(model) if head == "value" else None
        if config.adapter:
            self._load_start(Path(config.adapter))
        self._remember_start()

    def _add(self, weight: str, module: str, tensor: Tensor, transposed: bool = False) -> Slice | None:
        """Make the adapter of a weight. Returns the part of the weight that this rank holds."""
        shape, part = list(tensor.shape), slice_of(tensor, transposed=transposed)
        if part is not None:
            self.slices[weight] = part
        if transposed:
            self._transposed.add(weight)
            shape = [shape[0], shape[2], shape[1]]
        *experts, out, size = shape
        self._modules[weight] = module
        a = drawn_a(self._seed, weight, (*experts, self.info.rank, size))
        self.pairs[weight] = nn.Parameter(a), nn.Parameter(torch.zeros(*experts, out, self.info.rank))
        return part

    def _free_head(self, model: Any) -> nn.Parameter:
        """Return a value head that trains in float32, whole on every rank, in the place of the model's own."""
        module = getattr(model, VALUE_HEAD)
        module.forward = self._values
        return nn.Parameter(full(module.weight.detach()).float().clone())

    def _values(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return F.linear(hidden.float(), self.head)

    def at(self, weight: str) -> Pair | None:
        """Return the adapter of a weight. None: it has none, or the model computes without adapters."""
        return None if self._chosen is None else self._chosen.get(weight)

    @contextmanager
    def only_called(self) -> Iterator[None]:
        """Leave out the adapters of modules that no forward pass meanwhile calls: the model reads their weights itself.

        Of the modules of a layer that differ in a number (experts, of which tokens choose a few), one stands for all.
        Raises `ConfigError` if a target keeps no adapter, or if an adapter that the run starts from would be lost.
        """
        modules = {**self.linears, **{name: module for name, (module, _) in self.experts.items()}}
        uncalled: dict[str, Any] = {}
        for name, module in modules.items():
            uncalled[name] = module.register_forward_pre_hook(partial(_unhook, uncalled, name))
        try:
            yield
        finally:
            for hook in uncalled.values():
                hook.remove()
        alive = {_in_layer(name) for name in modules if name not in uncalled}
        if idle := [name for name in uncalled if _in_layer(name) not in alive]:
            self._leave_out(idle)

    def _leave_out(self, idle: list[str]) -> None:
        """Drop the adapters of modules that are never called."""
        some = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        why = "the model reads their weights without calling them, or does not use them for text"
        for name in idle:
            weights = [weight for weight in self.pairs if weight.rpartition(".")[0] == name]
            if self._config.adapter and any(self.pairs[weight][1].any() for weight in weights):
                raise ConfigError(
                    f"backend.lora.adapter: {self._config.adapter} changes {name}, which is never called: {why}. Merge "
                    "it into the model by PEFT's merge_and_unload, set model.path to that, and leave the adapter out"
                )
            for weight in weights:
                del self.pairs[weight], self._modules[weight]
                self._start.pop(weight, None)
                self.slices.pop(weight, None)
            self.linears.pop(name, None)
            self.experts.pop(name, None)
        for number, target in enumerate(self._config.targets):
            if not any(matches(target, name) for name in self.linears):
                words = f"{target!r} matches only layers that an adapter does not change ({some}): {why}"
                raise ConfigError(f"backend.lora.targets.{number}: {words}; leave it out")
        if not self.pairs:
            raise ConfigError(f"backend.lora: no layer is left to adapt ({some}): {why}; leave backend.lora out")
        logger.warning("backend.lora: no adapter for %s: %s", some, why)

    def allocate(self, *, start: bool) -> None:
        """Replace all adapters by new tensors without values: fake ones in a trace. `start`: a copy of them is held."""
        for weight, (a, b) in self.pairs.items():
            self.pairs[weight] = nn.Parameter(torch.empty(a.shape)), nn.Parameter(torch.empty(b.shape))
        if self.head is not None:
            self.head = nn.Parameter(torch.empty(self.head.shape))
        kept = self.pairs if start else {}
        self._start = {weight: (a.detach().clone(), b.detach().clone()) for weight, (a, b) in kept.items()}

    def to(self, device: torch.device) -> None:
        """Move the adapters, in place."""
        heads = [] if self.head is None else [(self.head,)]
        for pair in (*self.pairs.values(), *self._start.values(), *heads):
            for matrix in pair:
                matrix.data = matrix.data.to(device)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by PEFT's names without `base_model.model.`."""
        found: dict[str, Any] = {}
        for weight, (a, b) in self.pairs.items():
            found[self._modules[weight] + peft.A] = a
            found[self._modules[weight] + peft.B] = b
        if self.head is not None:
            found[f"{VALUE_HEAD}.weight"] = self.head
        return found

    # As PEFT has them

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the chosen adapters, and a value head, by the names and in the shapes of PEFT."""
        for weight, (a, b) in (self._chosen or {}).items():
            for end, matrix in ((peft.A, a), (peft.B, b)):
                name = self._modules[weight] + end
                yield peft.PREFIX + name, peft.stored(name, matrix.detach())
        if self.head is not None:
            yield HEAD_WEIGHT, self.head.detach()

    def put(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Set all adapters, and a value head, from tensors as `stored` yields them. Raises `WhetError` if the model has
        other adapters.
        """
        targets = {peft.PREFIX + name: parameter for name, parameter in self.parameters().items()}
        refuse_others({name: peft.stored(name, one).shape for name, one in targets.items()}, tensors, source)
        for name, parameter in targets.items():
            found = tensors[name]
            whole = peft.stacked(name, found, len(parameter)) if parameter.ndim == 3 else found
            parameter.data.copy_(whole)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        parameters = [f"{name}.{one}" for name, (_, names) in self.experts.items() for one in names]
        return peft.peft_config(self.info, base, self.linears, parameters, [VALUE_HEAD] * (self.head is not None))

    def _load_start(self, folder: Path) -> None:
        tensors = read_start(folder, self.info)
        if self.head is not None:
            tensors.setdefault(HEAD_WEIGHT, self.head.detach())
        self.put(tensors, f"backend.lora.adapter: {folder}")

    # With the weights of the model

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its chosen adapter added. A weight without one is returned as it is."""
        pair = self.at(name) if name in self.pairs else None
        if pair is None:
            return weight
        a, b = (matrix.detach().to(weight.device) for matrix in pair)
        return peft.merged(weight, a, b, self.info.scaling, transposed=name in self._transposed)

    def repeated(self) -> dict[str, int]:
        """Return how many ranks compute the same gradient, by the names of what is trained.

        Within tensor parallelism, all ranks do of a weight that is not split.
        """
        ranks = max((part.ranks for name, part in self.slices.items() if part.side != "experts"), default=1)
        weights = {module: weight for weight, module in self._modules.items()}
        found = {}
        for name in self.parameters():
            weight = weights.get(name.removesuffix(peft.A).removesuffix(peft.B))
            found[name] = 1 if weight in self.slices else ranks
        return found


class AdapterWeights(PolicyWeights):
    """The weights of a policy that trains adapters: the masters are the adapters, and the model stays as it is."""

    def __init__(self, root: AnyRoot, adapters: Adapters, ranks: int = 1, averaged: float = 1) -> None:
        """`averaged`: the factor of the objective that stands for the mean which FSDP2 takes over its gradients."""
        self.root, self.adapters, self._ranks, self._averaged = root, adapters, ranks, averaged
        self._low = {}
        self.masters: dict[str, Tensor] = dict(adapters.parameters())
        self.trained = self.masters

    @torch.no_grad()
    def computing(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the model's weights with the chosen adapters merged. Every rank takes part."""
        for name, parameter in self.root.model.named_parameters():
            whole = full(parameter.detach())
            if name == f"{VALUE_HEAD}.weight" and self.adapters.head is not None:
                whole = self.adapters.head.detach().to(whole.dtype)
            yield name, self.adapters.merge(name, whole)
        for name, buffer in persistent_buffers(self.root.model):
            yield name, buffer

    def matrices(self) -> set[str]:
        """Return the names of the trained matrices and of a value head. Stacked matrices are left out."""
        return {name for name, weight in self.trained.items() if weight.ndim == 2 and not name.startswith(VALUE_HEAD)}

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Sum the gradients over all ranks, in one collective."""
        repeated, gradients = self.adapters.repeated(), []
        for name, weight in self.trained.items():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad.div_(repeated[name]) if repeated[name] > 1 else weight.grad)
        if self._ranks == 1:
            return
        import torch.distributed as dist

        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat.div_(self._averaged)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _unhook(hooks: dict[str, Any], name: str, module: Any, given: Any) -> None:
    """Remove a hook at the first call, so that none is left where layers are compiled later."""
    hooks.pop(name).remove()


def _in_layer(name: str) -> str:
    """Return a module's name with a star for each number but the first, which is that of the layer."""
    parts = name.split(".")
    inner = [at for at, part in enumerate(parts) if part.isdigit()][1:]
    return ".".join("*" if at in inner else part for at, part in enumerate(parts))


def find_linears(model: Any, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Return the linear layers to adapt, by name: all in the text decoder's layers, or those that a target matches.

    Routers are left out: they return more than a product. Raises `ConfigError` if a target matches none.
    """
    linears = _linears(model)
    if not targets:
        inside = {id(module) for module in _in_layers(model)}
        return {name: module for name, module in linears.items() if id(module) in inside}
    return {name: linears[name] for name in chosen(targets, linears, type(model).__name__)}


def _linears(model: Any) -> dict[str, nn.Linear]:
    """Return all linear layers but heads and routers, by name."""
    heads = {id(model.get_output_embeddings()), id(getattr(model, VALUE_HEAD, None))}
    return {
        name: module for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in heads and not type(module).__name__.endswith("Router")
    }  # fmt: skip


def _in_layers(model: Any) -> list[nn.Module]:
    """Return the modules of the text decoder's layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())  # FSDP2 puts its name before that of a class
    layers = [module for module in model.get_decoder().modules() if type(module).__name__.removeprefix("FSDP") in names]
    return [module for layer in layers for module in layer.modules()]


def _nothing_to_adapt(model: Any) -> str:
    """Return what is wrong with a model whose layers have no linear layer, and what to change."""
    outside = sorted({name.rpartition(".")[2] for name in _linears(model)})
    weights = [(type(module).__name__, getattr(module, "weight", None)) for module in _in_layers(model)]
    kinds = {kind for kind, weight in weights if weight is not None and weight.ndim == 2}
    if outside:
        change = f"name layers in backend.lora.targets (it has {', '.join(outside)})"
    elif find_experts(model):
        change = "set backend.lora.experts: true"
    else:
        change = "leave backend.lora out to train all weights, or take a model whose layers are linear layers"
    found = f", only {', '.join(sorted(kinds))}" if kinds else ""
    return f"backend.lora: the layers of {type(model).__name__} have no nn.Linear to adapt{found}; {change}"


def find_experts(model: Any) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """Return the modules that hold stacked weights of experts, with the names of these, by the name of the module."""
    found = {}
    for name, module in model.named_modules():
        names = tuple(one for one, weight in module.named_parameters(recurse=False) if weight.ndim == 3)
        if names and name.rpartition(".")[2] == "experts":
            found[name] = module, names
    return found
