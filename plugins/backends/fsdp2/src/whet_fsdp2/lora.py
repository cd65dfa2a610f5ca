"""LoRA (Hu et al. 2021, arXiv:2106.09685): the model's weights are frozen, and two small matrices a weight are trained.

    linear layer    y = W x + s B (A x)      A [r, in] kaiming uniform, B [out, r] zero
    experts         W_e + s B_e A_e          A [E, r, in], B [E, out, r], added to the weights of all experts at once
    s               alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, arXiv:2312.03732)

A and B are float32 parameters of no module, whole and equal on every rank, so neither FSDP2 nor tensor parallelism
manages them. Each rank computes the gradient of the part that it uses: its batch shard, its rows of B, its columns of
A, its experts. The other parts are zero, so the gradient is the sum over all ranks, whatever the parallelism.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from whet.data import randomness
from whet.errors import ConfigError, WhetError
from whet_fsdp2.config import LoraConfig, adapter_info
from whet_fsdp2.feed import AnyRoot
from whet_fsdp2.weights import PolicyWeights, decoder_layers, full, persistent_buffers
from whet_weights import adapter as peft

Pair = tuple[Tensor, Tensor]
"""A and B of one weight."""
Pairs = Mapping[str, Pair]
"""By the name of the weight."""
TRIAL_SIZE = 0.3
"""Root mean square of a trial's update of a weight, times the root of the number of its inputs. The weights of trained
models have about 1, so a trial changes every layer clearly and breaks none."""
VALUE_HEAD = "score"


class Adapters:
    """The adapters of a model, and with a value head, the head: everything that is trained."""

    SETS = ("policy", "reference", "base", "trial")
    """The sets of weights that the model computes with; see `using`."""

    def __init__(self, model: Any, config: LoraConfig, seed: int, head: str = "lm") -> None:
        """Freeze the model, and add an adapter to each target. Call it before layers are sharded or wrapped.

        Raises `ConfigError` if a target matches nothing.
        """
        model.requires_grad_(False)
        self.info, self._config, self._seed = adapter_info(config), config, seed
        self.mesh: Any = None
        """The mesh of tensor parallelism, if linear layers compute with local slices of their weights."""
        self.expert_mesh: Any = None
        """The mesh of expert parallelism."""
        self.pairs: dict[str, Pair] = {}
        self._modules: dict[str, str] = {}
        """The module of PEFT's names, by the name of the weight."""
        self._transposed: set[str] = set()
        self._chosen: Pairs | None = self.pairs
        self.linears = find_linears(model, config.targets)
        self.experts = find_experts(model) if config.experts else {}
        if config.experts and not self.experts:
            raise ConfigError(f"backend.lora.experts: {type(model).__name__} has no stacked weights of experts")
        for name, linear in self.linears.items():
            self._add(f"{name}.weight", name, linear.weight.shape)
            self.mesh = self.mesh or _mesh(linear.weight)
            _wrap(linear, partial(_Linear, self, f"{name}.weight", linear))
        for name, (module, parameters) in self.experts.items():
            depths = [name + peft.WRAPPED * depth for depth in range(len(parameters))]
            for one, weight in peft.targets(depths, {name: parameters}):
                self._add(weight, one, getattr(module, weight.rpartition(".")[2]).shape, module)
            self.expert_mesh = self.expert_mesh or _mesh(getattr(module, parameters[0]))
            _wrap(module, partial(_Experts, self, name, module))
        self.head = _free_head(model) if head == "value" else None
        if config.adapter:
            self._load_start(Path(config.adapter))
        kept = self.pairs if config.adapter else {}
        self._start = {weight: (a.detach().clone(), b.detach().clone()) for weight, (a, b) in kept.items()}

    def _add(self, weight: str, module: str, shape: torch.Size, owner: Any = None) -> None:
        if getattr(owner, "is_transposed", False):
            self._transposed.add(weight)
            shape = torch.Size([shape[0], shape[2], shape[1]])
        *experts, out, size = shape
        self._modules[weight] = module
        draw = randomness.generator(self._seed, f"lora {weight}")
        bound = 1 / math.sqrt(size)  # kaiming_uniform_(a=sqrt(5)), as in PEFT
        a = draw.uniform(-bound, bound, (*experts, self.info.rank, size)).astype(np.float32)
        self.pairs[weight] = (
            nn.Parameter(torch.from_numpy(a)),
            nn.Parameter(torch.zeros(*experts, out, self.info.rank)),
        )

    def to(self, device: torch.device) -> None:
        """Move the adapters, in place."""
        for pair in (*self.pairs.values(), *self._start.values()):
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

    # Which of several sets of adapters computes

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Compute with other adapters meanwhile.

        `policy`: those in training. `reference`: those at the start of the run. `base`: none. `trial`: random ones.
        """
        before, self._chosen = self._chosen, self._set(weights)
        try:
            yield
        finally:
            self._chosen = before

    def at(self, weight: str) -> Pair | None:
        """Return the adapter of a weight. None: the model computes without adapters."""
        return None if self._chosen is None else self._chosen[weight]

    def _set(self, weights: str) -> Pairs | None:
        if weights == "trial":
            return {weight: self._trial(weight, *pair) for weight, pair in self.pairs.items()}
        if weights == "reference":  # without a start of its own, B is zero
            return self._start if self._config.adapter else None
        return self.pairs if weights == "policy" else None

    def _trial(self, weight: str, a: Tensor, b: Tensor) -> Pair:
        """Return random matrices whose update of a weight has the size `TRIAL_SIZE`."""
        draw, bound = randomness.generator(self._seed, f"lora trial {weight}"), 1 / math.sqrt(a.shape[-1])
        size = TRIAL_SIZE * math.sqrt(3 / self.info.rank) / self.info.scaling
        drawn = draw.uniform(-bound, bound, a.shape), size * draw.standard_normal(b.shape)
        first, second = (torch.from_numpy(matrix.astype(np.float32)).to(a.device) for matrix in drawn)
        return first, second

    # As PEFT has them

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the chosen adapters, and a value head, by the names and in the shapes of PEFT."""
        for weight, (a, b) in (self._chosen or {}).items():
            for end, matrix in ((peft.A, a), (peft.B, b)):
                name = self._modules[weight] + end
                yield peft.PREFIX + name, peft.stored(name, matrix.detach())
        if self.head is not None:
            yield f"{peft.PREFIX}{VALUE_HEAD}.weight", self.head.detach()

    def put(self, tensors: Mapping[str, Tensor], source: str) -> None:
        """Set all adapters, and a value head, from tensors as `stored` yields them. Raises `WhetError` if they are not
        those of this model.
        """
        targets = {peft.PREFIX + name: parameter for name, parameter in self.parameters().items()}
        if odd := sorted(targets.keys() ^ tensors.keys()):
            how = f"lacks {odd[0]}" if odd[0] in targets else f"holds {odd[0]}, which backend.lora does not train"
            words = "set backend.lora.targets and backend.lora.experts to those of the adapter"
            raise WhetError(f"{source} {how}; {words}")
        for name, parameter in targets.items():
            wanted, found = peft.stored(name, parameter).shape, tensors[name]
            if found.shape != wanted or not torch.isfinite(found).all():
                shape = list(found.shape)
                raise WhetError(f"{source}: {name} has shape {shape}, wanted {list(wanted)} and finite values")
        for name, parameter in targets.items():
            found = tensors[name]
            whole = peft.stacked(name, found, len(parameter)) if parameter.ndim == 3 else found
            parameter.data.copy_(whole)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        parameters = [f"{name}.{one}" for name, (_, names) in self.experts.items() for one in names]
        return peft.peft_config(self.info, base, self.linears, parameters, [VALUE_HEAD] * (self.head is not None))

    def _load_start(self, folder: Path) -> None:
        config, tensors = peft.read_peft(folder)
        for key, found, wanted in (
            ("rank", config["r"], self.info.rank),
            ("alpha", config["lora_alpha"], self.info.alpha),
            ("rslora", bool(config.get("use_rslora")), self.info.rslora),
        ):
            if found != wanted:
                raise ConfigError(
                    f"backend.lora.{key}: is {wanted}, and the adapter {folder} has {found}; set it to that"
                )
        if self.head is not None:
            tensors.setdefault(f"{peft.PREFIX}{VALUE_HEAD}.weight", self.head.detach())
        self.put(tensors, f"backend.lora.adapter: {folder}")

    # With the weights of the model

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a whole weight with its chosen adapter added. A weight without one is returned as it is."""
        pair = self.at(name) if name in self.pairs else None
        if pair is None:
            return weight
        a, b = (matrix.detach().to(weight.device) for matrix in pair)
        return peft.merged(weight, a, b, self.info.scaling, transposed=name in self._transposed)

    def is_transposed(self, name: str) -> bool:
        """Return whether a stacked weight is [E, in, out]."""
        return name in self._transposed


class AdapterWeights(PolicyWeights):
    """The weights of a policy that trains adapters: the masters are the adapters, and the model stays as it is."""

    def __init__(self, root: AnyRoot, adapters: Adapters) -> None:
        self.root, self.adapters = root, adapters
        self._low = []
        self.masters: dict[str, Tensor] = dict(adapters.parameters())
        self.trained = self.masters

    @torch.no_grad()
    def computing(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the model's weights with the chosen adapters merged. Every rank takes part."""
        for name, parameter in self.root.model.named_parameters():
            yield name, self.adapters.merge(name, full(parameter).detach())
        for name, buffer in persistent_buffers(self.root.model):
            yield name, buffer

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: a checkpoint has the adapters in PEFT's format."""
        yield from ()

    def matrices(self) -> set[str]:
        """Return the names of the trained matrices, but for those that are stacked, and a value head."""
        return {name for name, weight in self.trained.items() if weight.ndim == 2 and not name.startswith(VALUE_HEAD)}

    @torch.no_grad()
    def complete_gradients(self, ranks: int, averaged: float) -> int:
        """Sum the gradients over all ranks, in one collective. Returns how many ranks hold the same gradients.

        averaged: the factor of the objective that stands for the mean which FSDP2 takes over its gradients.
        """
        weights = list(self.trained.values())
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        if ranks == 1:
            return 1
        import torch.distributed as dist

        gradients = [weight.grad for weight in weights if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat.div_(averaged)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return ranks


def find_linears(model: Any, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Return the linear layers to adapt, by name: all in the decoder layers, or those that a target matches.

    A target is the name of a layer or the end of it after a dot, or a regular expression for the whole name. Raises
    `ConfigError` if one matches none.
    """
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    heads = {id(model.get_output_embeddings()), id(getattr(model, VALUE_HEAD, None))}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) not in heads}
    if not targets:
        return {name: module for name, module in linears.items() if id(module) in inside}
    found: dict[str, nn.Linear] = {}
    for number, target in enumerate(targets):
        hits = {n: m for n, m in linears.items() if f".{n}".endswith(f".{target}") or re.fullmatch(target, n)}
        if not hits:
            some = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise ConfigError(
                f"backend.lora.targets.{number}: {target!r} matches no linear layer but the head of "
                f"{type(model).__name__}; its layers have {some}"
            )
        found |= hits
    return {name: module for name, module in linears.items() if name in found}


def find_experts(model: Any) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """Return the modules that hold stacked weights of experts, with the names of these, by the name of the module."""
    found = {}
    for name, module in model.named_modules():
        names = tuple(one for one, weight in module.named_parameters(recurse=False) if weight.ndim == 3)
        if names and name.rpartition(".")[2] == "experts":
            found[name] = module, names
    return found


def _free_head(model: Any) -> nn.Parameter:
    """Let the value head train in float32, whatever the dtype of the model."""
    head = getattr(model, VALUE_HEAD)
    weight: nn.Parameter = head.weight.requires_grad_(True)
    head.forward = lambda hidden: F.linear(hidden.float(), head.weight)
    return weight


class _Linear:
    """The forward pass of a linear layer with its adapter."""

    def __init__(self, adapters: Adapters, name: str, module: nn.Linear, inner: Callable[[Any], Any]) -> None:
        self._adapters, self._name, self._module, self._inner = adapters, name, module, inner

    def __call__(self, x: Tensor) -> Tensor:
        """Return W x + bias + s B (A x). x [..., in] -> [..., out]."""
        y: Tensor = self._inner(x)
        pair = self._adapters.at(self._name)
        if pair is None:
            return y
        scaling, weight, mesh = self._adapters.info.scaling, self._module.weight, self._adapters.mesh
        a, b = pair
        if isinstance(x, DTensor) and isinstance(y, DTensor):
            return _add_sharded(x, y, weight, a, b, scaling)
        if weight.shape != (len(b), a.shape[1]):  # a slice, without gradient: see `mesh`
            column = weight.shape[0] != len(b)
            a, b = (a, b[_span(len(b), mesh)]) if column else (a[:, _span(a.shape[1], mesh)], b)
        return y + _update(x, a, b, scaling)


class _Experts:
    """The forward pass of an experts module whose stacked weights have adapters."""

    def __init__(self, adapters: Adapters, name: str, module: nn.Module, inner: Callable[..., Any]) -> None:
        self._adapters, self._module, self._inner = adapters, module, inner
        self._names = {one: f"{name}.{one}" for one in adapters.experts[name][1]}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with W + s B A in the place of each W. Arguments are those of the module."""
        module, placed = self._module, {}
        for one, weight in self._names.items():
            pair = self._adapters.at(weight)
            if pair is not None:
                placed[one] = self._sum(weight, module._parameters[one], *pair)
        vars(module).update(placed)  # found before the module's own parameters
        try:
            return self._inner(*args, **kwargs)
        finally:
            for one in placed:
                del vars(module)[one]

    def _sum(self, name: str, weight: Any, a: Tensor, b: Tensor) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if len(local) != len(a):
            here = _span(len(a), self._adapters.expert_mesh)
            a, b = a[here], b[here]
        a, b = a.to(local.dtype), b.to(local.dtype)
        left, right = (a.mT, b.mT) if self._adapters.is_transposed(name) else (b, a)
        found = torch.baddbmm(local, left, right, alpha=self._adapters.info.scaling)
        if isinstance(weight, DTensor):
            return DTensor.from_local(found, weight.device_mesh, weight.placements, run_check=False)
        return found


def _update(x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    return F.linear(F.linear(x, a.to(x.dtype)), (b * scaling).to(x.dtype))


def _add_sharded(x: DTensor, y: DTensor, weight: Any, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return y + s B (A x) within tensor parallelism.

    Weight split by rows: x is whole, and each rank computes its outputs. By columns: x is split, and each rank computes
    a term of the sum over ranks.
    """
    (placement,), mesh = weight.placements, weight.device_mesh
    assert isinstance(placement, Shard), placement
    if placement.dim == 0:
        part = _update(x.to_local(grad_placements=[Partial()]), a, b[_span(len(b), mesh)], scaling)
        placed: Any = Shard(y.ndim - 1)
    else:
        part, placed = _update(x.to_local(), a[:, _span(a.shape[1], mesh)], b, scaling), Partial()
    added = DTensor.from_local(part, mesh, [placed], run_check=False, shape=y.shape, stride=y.stride())
    return y + added


def _span(size: int, mesh: Any) -> slice:
    """Return the part of a dimension that this rank of a mesh of one dimension holds."""
    if mesh is None:
        raise WhetError("a layer computes with a slice of its weight, and its adapter was not told of the mesh")
    each = -(-size // mesh.size())
    return slice(min(each * mesh.get_local_rank(), size), min(each * (mesh.get_local_rank() + 1), size))


def _mesh(weight: Any) -> Any:
    """Return the mesh over which tensor or expert parallelism has split a weight before; None: it has not."""
    return weight.device_mesh if isinstance(weight, DTensor) and any(p.is_shard() for p in weight.placements) else None


def _wrap(module: Any, make: Callable[[Any], Any]) -> None:
    """Replace a module's forward pass by `make(forward)`.

    Where tensor or expert parallelism of `transformers` has wrapped it, it is replaced inside of the wrapper, which
    prepares the inputs and joins the outputs.
    """
    outer = vars(module).get("forward")
    if getattr(outer, "__name__", "") in ("tp_forward", "ep_forward"):
        cells = dict(zip(outer.__code__.co_freevars, outer.__closure__, strict=True))
        cells["original_forward"].cell_contents = make(cells["original_forward"].cell_contents)
    else:
        module.forward = make(module.forward)
