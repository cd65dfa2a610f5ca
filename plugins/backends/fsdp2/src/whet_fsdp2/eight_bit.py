"""AdamW whose moments have 8 bits, by the package bitsandbytes. Dettmers et al. 2021 (arXiv:2110.02861).

Blocks of 256 numbers share a scale, the largest of them: number = map[code] * scale. The package computes on plain
tensors, so each rank gives it its shards; small ones keep float32.

A checkpoint has the moments as float32, so that any layout can go on, and `adamw` as well. In another layout blocks
begin elsewhere, so the moments are rounded again. In the same layout the scales, which a checkpoint has too, give back
every code: the continuation is bitwise.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError
from whet_fsdp2.config import OptimizerConfig

BLOCK = 256
"""Numbers that share a scale. Fixed in the kernels of bitsandbytes."""
_PARTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""The moments, and how bitsandbytes numbers them."""


def adamw(groups: Iterable[Mapping[str, object]], config: OptimizerConfig) -> Any:
    """Return the optimizer. Raises `ConfigError` if the package is missing, or cannot work here."""
    try:
        import bitsandbytes
    except Exception as error:  # it loads a library that is compiled for some versions of CUDA
        words = f"is adamw_8bit, which needs the package bitsandbytes in the trainer's Python: {error}"
        raise ConfigError(f"backend.optimizer.kind: {words}; pip install bitsandbytes, or set it to adamw") from error
    return bitsandbytes.optim.AdamW8bit(list(groups), lr=config.lr, betas=config.betas, eps=config.eps)


def moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the moments of a weight as float32."""
    return {
        name: _decoded(state[f"state{n}"], state[f"absmax{n}"], state[f"qmap{n}"]) if f"qmap{n}" in state
        else state[f"state{n}"]
        for name, n in _PARTS.items()
    }  # fmt: skip


def scales(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the scales [blocks] of each moment of a weight. Empty: the moments are float32."""
    return {name: state[f"absmax{n}"] for name, n in _PARTS.items() if f"absmax{n}" in state}


def held(state: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a weight's state that grow with the weight."""
    names = [f"{kind}{n}" for kind in ("state", "absmax") for n in _PARTS.values()]
    return [state[name] for name in names if name in state]


def make_state(optimizer: Any, weight: Tensor) -> Any:
    """Return the state of a weight that has taken no step."""
    for number, group in enumerate(optimizer.param_groups):
        for place, one in enumerate(group["params"]):
            if one is weight:
                optimizer.init_state(group, weight, number, place)
    return optimizer.state[weight]


def fill(state: Mapping[str, Any], step: int, found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    """Write moments into the state of a weight. `known`: scales [blocks] with which they were coded."""
    state["step"] = step  # type: ignore[index]  # a dictionary of the package
    for name, n in _PARTS.items():
        if f"qmap{n}" not in state:
            state[f"state{n}"].copy_(found[name])
            continue
        blocks = _blocks(found[name].reshape(-1))
        scale = known[name] if name in known else blocks.abs().amax(1)
        state[f"absmax{n}"].copy_(scale)
        table = state[f"qmap{n}"]
        edges = (table[1:] + table[:-1]) / 2
        codes = torch.searchsorted(edges, blocks / scale.clamp(min=1e-30)[:, None], out_int32=True)
        target = state[f"state{n}"]
        target.copy_(codes.view(-1)[: target.numel()].view_as(target))


def _decoded(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    values = _blocks(table[codes.reshape(-1).int()]) * scale[:, None]
    return values.view(-1)[: codes.numel()].view_as(codes)


def _blocks(flat: Tensor) -> Tensor:
    """Return numbers in rows of a block each, the last one padded with 0."""
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
