"""The weights of a policy on one rank: float32 masters, the copies for the forward pass, and their sharding."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from whet_fsdp2.feed import AnyRoot


class PolicyWeights:
    """Float32 master weights that the optimizer updates, by their names in `transformers`.

    On several ranks, and on one rank in float32, the masters are the module's own parameters (FSDP2 casts them when it
    gathers them). On one rank in bfloat16 the module holds a bfloat16 copy. Its gradients are added to the float32
    gradients of the masters as soon as they are complete.
    """

    def __init__(self, root: AnyRoot, low_precision: bool) -> None:
        self.root = root
        self._low: list[tuple[nn.Parameter, Tensor]] = []
        self.masters: dict[str, Tensor] = {}
        for name, parameter in root.model.named_parameters():
            if low_precision:
                master = parameter.detach().clone()
                parameter.data = parameter.data.to(torch.bfloat16)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_add_into(master))
                self._low.append((parameter, master))
                self.masters[name] = master
            else:
                self.masters[name] = parameter
        self.trained = {
            name: self.masters[name] for name, p in root.model.named_parameters() if p.requires_grad
        }  # fmt: skip

    @torch.no_grad()
    def push(self) -> None:
        """Copy the values of the masters to the bfloat16 copies."""
        for parameter, master in self._low:
            parameter.copy_(master)

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for master in self.masters.values():
            master.grad = None

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients."""
        return [local(master.grad) for master in self.trained.values() if master.grad is not None]

    def complete_gradients(self, ranks: int, averaged: float) -> int:
        """Do what FSDP2 has not done at the end of a backward pass. Returns how many ranks hold the same gradients."""
        return 1

    def matrices(self) -> set[str]:
        """Return the names of the matrices in the layers: all 2-D weights but embeddings and heads."""
        return matrices(self.root)

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the masters that a checkpoint has by their names."""
        yield from self.masters.items()

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        """Set a master from its full value."""
        local(self.masters[name]).copy_(local(shard_like(value, self.masters[name])))

    @torch.no_grad()
    def computing(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the weights that the forward pass uses. Every rank must iterate to the end."""
        copies = {id(master): parameter for parameter, master in self._low}
        for name, master in self.masters.items():
            yield name, full(copies.get(id(master), master)).detach()
        for name, buffer in persistent_buffers(self.root.model):
            yield name, buffer


def _add_into(master: Tensor) -> Any:
    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def matrices(root: AnyRoot) -> set[str]:
    """Return the names of the matrices in the layers: all 2-D weights but embeddings and heads."""
    model = root.model
    head = model.get_output_embeddings()
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    others = {id(parameter) for module in outer for parameter in module.parameters()}
    inside = {id(parameter) for parameter in model.base_model.parameters() if parameter.ndim == 2} - others
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard. A plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. Every rank must take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor, sharded like `like`. No communication."""
    value = value.to(local(like).device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def persistent_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a saved model contains."""
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def shard(
    root: AnyRoot, *, ranks: int, device: torch.device, low_precision: bool, reshard_after_forward: bool,
    whole: Collection[nn.Parameter] = (),
) -> None:  # fmt: skip
    """Shard a module over all ranks with FSDP2: each decoder layer, then the rest. In place.

    `whole`: parameters of the rest that stay as they are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low_precision else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # temperatures stay float32
    )
    for layer in decoder_layers(root.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=precision, ignored_params=set(whole))


def reshard(root: AnyRoot) -> None:
    """Free gathered weights. Needed after a forward pass that has no backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers and frees one by one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
