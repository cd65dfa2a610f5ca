"""Take new weights from a weight sync: whole stored tensors, of which each rank keeps its parts."""

from collections.abc import Iterable

import torch
from torch import Tensor

from whet.errors import WeightSyncError
from whet_megatron import cuts
from whet_megatron.architecture import Architecture
from whet_megatron.weights import ModelWeights, Ruled


@torch.no_grad()
def take(weights: ModelWeights, architecture: Architecture, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's parts of stored weights into its parameters.

    Raises `WeightSyncError` if a weight of the model is missing, comes twice or has another shape, or is of another
    model. After an error the weights are a mixture and must not be used.
    """
    waiting = dict[str, list[Ruled]]()
    for one in weights.ruled.values():
        for name in one.stored:
            waiting.setdefault(name, []).append(one)
    arrived = dict[tuple[str, ...], dict[str, Tensor]]()
    seen = set[str]()
    for name, tensor in tensors:
        if name in seen:
            raise WeightSyncError(f"{name} was sent twice")
        seen.add(name)
        for one in waiting.get(name, ()):
            parts = arrived.setdefault(one.stored, {})
            parts[name] = tensor if len(one.stored) == 1 else tensor.clone()  # the sender's buffer is used again
            if len(parts) == len(one.stored):
                _write(weights, architecture, one, [parts[part] for part in one.stored])
                del arrived[one.stored]
    _refuse_missing(weights, waiting.keys(), seen, architecture)


def _refuse_missing(weights: ModelWeights, mine: Iterable[str], seen: set[str], architecture: Architecture) -> None:
    """Raise `WeightSyncError` unless all weights of this rank came, and of each parameter of the others one."""
    missing = sorted((set(mine) | weights.names) - seen)
    if architecture.tied:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise WeightSyncError(f"{len(missing)} weights were not sent: {', '.join(missing[:5])}{more}")


def _write(weights: ModelWeights, architecture: Architecture, one: Ruled, stored: list[Tensor]) -> None:
    place, shape = weights.place(one), tuple(one.parameter.shape)
    wanted = cuts.stored_shapes(one.rule.cut, shape, place, architecture)
    for name, tensor, size in zip(one.stored, stored, wanted, strict=True):
        if tuple(tensor.shape) != size:
            raise WeightSyncError(f"{name} was sent with shape {tuple(tensor.shape)}, wanted {size}")
    one.parameter.copy_(cuts.take(one.rule.cut, stored, shape, place, architecture))
