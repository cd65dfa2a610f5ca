"""Which part of a tensor a rank holds, as rectangular regions. Checkpoints are written and read by them.

    weight [8, H] over fsdp 2 x tensor 2: tensor parallel ranks split rows first, FSDP2 splits what each of them has

        fsdp 0  tensor 0   rows 0 1       fsdp 0  tensor 1   rows 4 5
        fsdp 1  tensor 0   rows 2 3       fsdp 1  tensor 1   rows 6 7

A fused weight (gate and up in one) that tensor parallel ranks split has two regions on each rank.
"""

from collections.abc import Iterator
from itertools import product

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Run = tuple[int, int, int]
"""A run of indices along one dimension: its begin in the whole tensor, its begin in the shard, its length."""


@frozen
class Region:
    """A rectangle of a tensor. `begin` and `size` have one number for each dimension."""

    begin: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the slices that cut this region out of a tensor that holds `outer`."""
        places = zip(self.begin, self.size, outer.begin, strict=True)
        return tuple(slice(b - o, b - o + s) for b, s, o in places)

    def overlap(self, other: "Region") -> "Region | None":
        """Return the region that both have. None: there is none."""
        begin = tuple(map(max, self.begin, other.begin))
        ends = [min(b + s, c + t) for b, s, c, t in zip(self.begin, self.size, other.begin, other.size, strict=True)]
        size = tuple(end - b for end, b in zip(ends, begin, strict=True))
        return Region(begin, size) if all(s > 0 for s in size) else None


def regions(tensor: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield the regions that this rank holds, each with the part of the shard that has its numbers (a view)."""
    if not isinstance(tensor, DTensor):
        yield Region((0,) * tensor.ndim, tuple(tensor.shape)), tensor
        return
    shard = tensor.to_local()
    runs = [_runs(tensor, dim) for dim in range(tensor.ndim)]
    for chosen in product(*runs):
        region = Region(tuple(run[0] for run in chosen), tuple(run[2] for run in chosen))
        yield region, shard[tuple(slice(run[1], run[1] + run[2]) for run in chosen)]


def writes(tensor: Tensor, rank: int) -> bool:
    """Return whether this rank is the one that writes its part, of all ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or int(mesh.mesh.min()) != 0:
        return False
    return not any(at for at, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate())


def _runs(tensor: DTensor, dim: int) -> list[Run]:
    """Return the runs of indices along a dimension that this rank holds."""
    found = torch.arange(tensor.shape[dim])
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    inner = 1  # ranks that split this dimension before FSDP2 does
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate() or placement.dim % tensor.ndim != dim:  # type: ignore[attr-defined]  # all others shard
            continue
        found = _split(found, placement, mesh.size(axis), place[axis], inner)
        inner *= mesh.size(axis)
    if not len(found):
        return []
    cuts = torch.nonzero(found[1:] - found[:-1] != 1).flatten().add(1).tolist()
    edges = list(zip([0, *cuts], [*cuts, len(found)], strict=True))
    return [(int(found[begin]), begin, end - begin) for begin, end in edges]


def _split(indices: Tensor, placement: Placement, ranks: int, rank: int, inner: int) -> Tensor:
    """Return a rank's part of indices."""
    if isinstance(placement, _StridedShard) and placement.split_factor != inner:  # a fused weight
        groups = indices.chunk(int(placement.split_factor))
        return torch.cat([_chunk(group, ranks, rank) for group in groups])
    return _chunk(indices, ranks, rank)


def _chunk(indices: Tensor, ranks: int, rank: int) -> Tensor:
    parts = indices.chunk(ranks)
    return parts[rank] if rank < len(parts) else indices[:0]
