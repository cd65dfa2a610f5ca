"""Sharding of weights over the ranks by `transformers`, and what has to be known of sharded tensors.

`from_pretrained(distributed_config=...)` makes the model on the meta device, applies tensor and expert parallelism and
FSDP2, and then reads each rank's shards only. So no rank ever holds the whole model.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from whet.errors import ConfigError
from whet_fsdp2.ranks import Ranks

_REDISTRIBUTION = logging.getLogger("torch.distributed.tensor._redistribute")
WANTED = "5.23"
"""The version of transformers whose sizes this module needs."""
PARTIAL = "replicated_with_grad_allreduce"
"""The style of a weight that tensor parallel ranks hold whole, and whose gradient each of them has a part of."""


@contextmanager
def sharding(ranks: Ranks, low_precision: bool, keep: bool) -> Iterator[Any]:
    """Yield the argument `distributed_config` of `from_pretrained`, for a model that is loaded in this context.

    `keep`: layers stay whole between their forward and backward pass. All models of a process that are sharded alike
    share their process groups: each group costs threads with gloo, and memory with NCCL.
    """
    from transformers import __version__
    from transformers.distributed import DistributedConfig, mixin
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    sizes, grid = ranks.grid.sizes, ranks.grid
    wanted: dict[str, Any] = {"tp_size": sizes.tensor, "fsdp_size": grid.fsdp}
    if sizes.replicate > 1:
        wanted["dp_replicate_size"] = sizes.replicate
    if sizes.expert > 1:
        wanted["ep_size"] = sizes.expert
    wanted["fsdp_mixed_precision"] = low_precision
    apply = getattr(mixin, "apply_fully_sharded_data_parallelism", None)
    if keep and apply is None:
        wanted["fsdp_plan"] = {"model.layers.*": "keep_full_weight"}
    known = DistributedConfig.__dataclass_fields__
    if unknown := sorted(name for name in wanted if name not in known):
        raise ConfigError(
            f"{ranks.role}.parallel: transformers {__version__} has no {', '.join(unknown)} in its DistributedConfig; "
            f"install transformers >= {WANTED}"
        )
    place = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(ranks.device.index or 0)
    make_mesh = getattr(mixin, "initialize_distributed_mesh", None)  # versions before 5.23 make a mesh for each model
    if make_mesh is not None:
        mixin.initialize_distributed_mesh = lambda config: ranks.once(f"mesh {wanted}", lambda: make_mesh(config))
    # This style reduces the gradient that has been accumulated, after each micro-batch; `sum_partial` reduces it once.
    ALL_PARALLEL_STYLES[PARTIAL] = TensorParallelLayer()
    if apply is not None:
        shard = partial(_shard_all_but_kept, apply)
        mixin.apply_fully_sharded_data_parallelism = partial(_keep_layers, shard) if keep else shard
    try:
        yield DistributedConfig(**wanted)
    finally:
        if apply is not None:
            mixin.apply_fully_sharded_data_parallelism = apply
        if make_mesh is not None:
            mixin.initialize_distributed_mesh = make_mesh
        del ALL_PARALLEL_STYLES[PARTIAL]
        if place is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = place


def _keep_layers(shard: Any, model: Any, meshes: Any, plan: dict[str, str], *more: Any) -> Any:
    """Shard a model so that the layers of its decoder stay whole between their forward and backward pass."""
    layers = set(getattr(model.get_decoder(), "layers", ()))
    names = {name for name, module in model.named_modules() if module in layers}
    return shard(model, meshes, plan | dict.fromkeys(names & plan.keys(), "keep_full_weight"), *more)


def _shard_all_but_kept(apply: Any, model: Any, *arguments: Any, **more: Any) -> Any:
    """Call a function of transformers that applies FSDP2, without the weights that stay in float32.

    FSDP2 casts all weights of a layer to one dtype, and wants all to be stored in one. So each rank holds these few
    weights whole, and `PolicyWeights.complete_gradients` takes the mean of their gradients.
    """
    from transformers.distributed import fsdp

    names, shard = kept_in_float32(model), fsdp.fully_shard
    kept = {parameter for name, parameter in model.named_parameters() if name in names}
    if split := sorted(name for name, one in model.named_parameters() if name in names and is_split(one)):
        raise ConfigError(
            f"backend.parallel.tensor: {type(model).__name__} keeps {split[0]} in float32, and tensor parallel ranks "
            "split it, so nothing averages its gradient over the other ranks; set backend.parallel.tensor: 1"
        )
    fsdp.fully_shard = partial(shard, ignored_params=kept) if kept else shard
    try:
        return apply(model, *arguments, **more)
    finally:
        fsdp.fully_shard = shard


def tensor_group(model: Any) -> Any:
    """Return the process group of the tensor parallel ranks. None: there is one such rank."""
    manager = getattr(model, "_mesh_manager", None)
    if manager is None or manager.get_mesh("tp").size() == 1:
        return None
    return manager.get_mesh("tp").get_group()


def partial_names(model: Any) -> set[str]:
    """Return the names of the weights whose gradients tensor parallel ranks have to add up."""
    rules = [rule for rule, style in (getattr(model, "tp_plan", None) or {}).items() if style == PARTIAL]
    generic = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_parameters()}
    return {name for name, one in generic.items() if one in rules or one.rpartition(".")[0] in rules}


def copies(tensor: Tensor, ranks: int) -> float:
    """Return how many of the ranks hold each number of a tensor of which this is a shard, or the whole."""
    if not isinstance(tensor, DTensor):
        return ranks
    shards = 1
    for axis, placement in enumerate(tensor.placements):
        shards *= 1 if placement.is_replicate() else tensor.device_mesh.size(axis)
    return ranks / shards


def is_split(tensor: Tensor) -> bool:
    """Return whether ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard. A plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one. Every rank must take part."""
    if not isinstance(tensor, DTensor):
        return tensor
    level = _REDISTRIBUTION.level
    _REDISTRIBUTION.setLevel(logging.ERROR)  # it advises against meshes of two axes, for every tensor
    try:
        return tensor.full_tensor()
    finally:
        _REDISTRIBUTION.setLevel(level)


def like(shard: Tensor, sharded: Tensor) -> Tensor:
    """Return this rank's shard as a part of a tensor that is sharded in the same way."""
    if not isinstance(sharded, DTensor):
        return shard
    shape, stride = sharded.shape, sharded.stride()
    return DTensor.from_local(
        shard, sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
    )


def shard_like(value: Tensor, sharded: Tensor) -> Tensor:
    """Return a full tensor, sharded in the same way as another one. No communication."""
    value = value.to(local(sharded).device)
    if not isinstance(sharded, DTensor):
        return value
    return distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Free gathered weights. Needed after a forward pass that has no backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def sum_partial(gradients: "list[Tensor]", group: Any, divisor: int = 1) -> None:
    """Add up gradients of weights that all ranks of a group hold whole, and divide the sums. In place."""
    import torch.distributed as dist

    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat.div_(divisor)
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def kept_in_float32(model: Any) -> set[str]:
    """Return the names of the parameters that the model's class keeps in float32: some routers, and their biases."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [re.compile(rf"(^|\.){part}($|\.)") for part in parts]
    return {name for name, _ in model.named_parameters() if any(pattern.search(name) for pattern in patterns)}


def is_wrapped(module: Any) -> bool:
    """Return whether tensor or expert parallelism of `transformers` has wrapped a module's forward pass."""
    return getattr(vars(module).get("forward"), "__name__", "") in ("tp_forward", "ep_forward")
