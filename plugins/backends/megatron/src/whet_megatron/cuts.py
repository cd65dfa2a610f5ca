"""The cuts of `whet_megatron.rules`: stored weights to the part of a rank, and the parts of all ranks back.

Only what a rank holds is read: a weight is given as slices of its file, `weight[begin:end]` for rows and
`weight[:, begin:end]` for columns.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor

from whet_megatron.architecture import Architecture
from whet_megatron.rules import Cut


class Slices(Protocol):
    """A stored weight that is read in slices. Tensors are such, and so are slices of `safetensors`."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return a slice."""


@frozen
class Place:
    """A rank among those that share a parameter."""

    rank: int
    ranks: int

    def part(self, size: int) -> slice:
        """Return this rank's part of so many rows or columns."""
        return slice(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)


def take(cut: Cut, stored: Sequence[Slices], shape: Sequence[int], place: Place, model: Architecture) -> Tensor:
    """Return a rank's part of a parameter of this shape, read from the stored weights."""
    if cut == "whole":
        return stored[0][:]
    if cut == "columns":
        return stored[0][:, place.part(shape[1] * place.ranks)]
    if cut == "rows":
        return stored[0][place.part(shape[0] * place.ranks)]
    if cut == "gated":
        rows = place.part(shape[0] // 2 * place.ranks)
        return torch.cat([weight[rows] for weight in stored])
    if cut == "vocabulary":
        rows = place.part(shape[0] * place.ranks)
        found = stored[0][min(rows.start, model.vocabulary) : min(rows.stop, model.vocabulary)]
        return torch.cat([found, found.new_zeros(shape[0] - len(found), *found.shape[1:])])
    heads = place.part(model.heads), place.part(model.kv_heads), place.part(model.kv_heads)
    parts = [
        weight[one.start * model.head_dim : one.stop * model.head_dim]
        for weight, one in zip(stored, heads, strict=True)
    ]
    groups = model.kv_heads // place.ranks
    split = [part.reshape(groups, -1, model.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(split, 1).reshape(-1, *parts[0].shape[1:])


def join(cut: Cut, parts: Sequence[Tensor], model: Architecture) -> list[Tensor]:
    """Return the stored weights of a parameter from the parts of all ranks, in their order. The inverse of `take`."""
    if cut == "whole":
        return [parts[0]]
    if cut == "columns":
        return [torch.cat(list(parts), 1)]
    if cut == "rows":
        return [torch.cat(list(parts))]
    if cut == "gated":
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[n] for half in halves]) for n in range(2)]
    if cut == "vocabulary":
        return [torch.cat(list(parts))[: model.vocabulary]]
    whole = torch.cat(list(parts))
    rest = whole.shape[1:]
    per_group = model.heads // model.kv_heads
    split = whole.reshape(model.kv_heads, per_group + 2, model.head_dim, *rest)
    queries, keys, values = split[:, :per_group], split[:, per_group], split[:, per_group + 1]
    return [one.reshape(-1, *rest).contiguous() for one in (queries, keys, values)]


def stored_shapes(cut: Cut, shape: Sequence[int], place: Place, model: Architecture) -> list[tuple[int, ...]]:
    """Return the shapes of the stored weights of a parameter, from the shape of a rank's part."""
    rows, rest = shape[0], tuple(shape[1:])
    if cut == "whole":
        return [tuple(shape)]
    if cut == "columns":
        return [(rows, rest[0] * place.ranks)]
    if cut == "rows":
        return [(rows * place.ranks, *rest)]
    if cut == "gated":
        return [(rows // 2 * place.ranks, *rest)] * 2
    if cut == "vocabulary":
        return [(model.vocabulary, *rest)]
    return [(heads * model.head_dim, *rest) for heads in (model.heads, model.kv_heads, model.kv_heads)]
