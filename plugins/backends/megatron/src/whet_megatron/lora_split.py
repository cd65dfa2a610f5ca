"""Which parts of an adapter a rank holds: those that its part of the weight needs.

                                   A                        B
    linear layer, outputs split    [r, in]                  [out / tensor, r]
    linear layer, inputs split     [r, in / tensor]         [out, r]
    experts, outputs split         [E / expert, r, in]      [E / expert, fused, out / fused / expert_tensor, r]
    experts, inputs split          [E / expert, r, in / expert_tensor]      [E / expert, 1, out, r]

Gate and up of an expert are fused in one weight, and a rank holds its rows of the gate, then its rows of up. So the
rows of B have two dimensions, of which the second is split: then a checkpoint can be split anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from whet_megatron.cuts import Place
from whet_megatron.lora_targets import Weight
from whet_training.lora import Pair
from whet_weights import adapter as peft


@frozen
class Split:
    """The part of the adapter of a linear layer."""

    weight: Weight
    place: Place
    """This rank's place among those that split each matrix."""
    sequence: bool = False
    """Whether these ranks share out the tokens of residuals."""

    def shapes(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of the whole A and B."""
        return (rank, self.weight.columns), (self.weight.rows, rank)

    def axis(self, end: str) -> int | None:
        """Return the dimension along which ranks split A or B. None: every rank has all of it."""
        if end == peft.A:
            return 1 if self.weight.side == "in" else None
        return 0 if self.weight.side == "out" else None

    def part(self, a: Tensor, b: Tensor) -> Pair:
        """Return this rank's part of the whole A and B."""
        return self._own(a, peft.A), self._own(b, peft.B)

    def _own(self, whole: Tensor, end: str) -> Tensor:
        axis = self.axis(end)
        if axis is None:
            return whole
        part = self.place.part(whole.shape[axis])
        return whole.narrow(axis, part.start, part.stop - part.start)

    def whole(self, half: Tensor, end: str) -> Tensor:
        """Return the whole A or B from the parts of all ranks that split it. They must take part."""
        from megatron.core import parallel_state

        return _gathered(half, self.axis(end), parallel_state.get_tensor_model_parallel_group())

    def mark(self, parameter: Any, end: str) -> None:
        """Mark A or B for Megatron's sums of gradients, and for their norm."""
        axis = self.axis(end)
        if axis is None:
            parameter.sequence_parallel = self.sequence  # whether Megatron adds its gradient up over tensor ranks
        else:  # else its norm counts that of one rank only
            _mark_split(parameter, axis)

    def sharded(self, name: str, parameter: Any, end: str) -> Any:
        """Return Megatron's description of A or B, by which it saves moments for any parallelism."""
        from megatron.core import utils

        if (axis := self.axis(end)) is None:
            return utils.make_sharded_tensor_for_checkpoint(parameter, name)
        return utils.make_tp_sharded_tensor_for_checkpoint(parameter, name, tp_axis=axis)

    def stored(self, name: str, whole: Tensor) -> Tensor:
        """Return the whole A or B in the shape that it has in PEFT's files."""
        return whole

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole A or B from a tensor in the shape of PEFT's files."""
        return tensor


@frozen
class ExpertSplit(Split):
    """The part of the adapter of a stacked weight of experts. `place`: among the tensor parallel ranks of an expert."""

    held: Place = field(kw_only=True)
    """This rank's place among those that have different experts."""

    def shapes(self, rank: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of the whole A and B."""
        of = self.weight
        return (of.experts, rank, of.columns), (of.experts, of.fused, of.rows // of.fused, rank)

    def axis(self, end: str) -> int | None:
        """Return the dimension along which ranks split A or B of an expert. None: every one of them has all of it."""
        return 2 if (end == peft.A) == (self.weight.side == "in") else None

    def part(self, a: Tensor, b: Tensor) -> Pair:
        """Return this rank's part of the whole A and B."""
        experts = self.held.part(self.weight.experts)
        return super().part(a[experts], b[experts])

    def whole(self, half: Tensor, end: str) -> Tensor:
        """Return the whole A or B from the parts of all ranks that split it. They must take part."""
        from megatron.core import parallel_state

        experts = _gathered(half, self.axis(end), parallel_state.get_expert_tensor_parallel_group())
        return _gathered(experts, 0, parallel_state.get_expert_model_parallel_group())

    def mark(self, parameter: Any, end: str) -> None:
        """Mark A or B for Megatron's sums of gradients, and for their norm."""
        parameter.allreduce = self.held.ranks == 1  # else its gradient is added up over a group of its own
        _mark_split(parameter, self.axis(end) or 0)  # each rank has other experts
        # A half that all tensor parallel ranks of an expert have counts once.
        parameter.shared = self.axis(end) is None and self.place.rank > 0

    def sharded(self, name: str, parameter: Any, end: str) -> Any:
        """Return Megatron's description of A or B, by which it saves moments for any parallelism."""
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing import ShardedTensor

        offsets, copy = [(0, self.held.rank, self.held.ranks)], 0
        if (axis := self.axis(end)) is None:
            copy = self.place.rank
        else:
            offsets.append((axis, self.place.rank, self.place.ranks))
        replica = 0, copy, parallel_state.get_expert_data_parallel_rank()
        return ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica)

    def stored(self, name: str, whole: Tensor) -> Tensor:
        """Return the whole A or B in the shape that it has in PEFT's files."""
        return peft.stored(name, whole if whole.ndim == 3 else whole.flatten(1, 2))

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole A or B from a tensor in the shape of PEFT's files."""
        found = peft.stacked(name, tensor, self.weight.experts)
        if name.endswith(peft.A):
            return found
        return found.reshape(len(found), self.weight.fused, -1, found.shape[2])


def _mark_split(parameter: Any, axis: int) -> None:
    """Mark a parameter of which other tensor parallel ranks have other parts."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = axis, 1


def _gathered(half: Tensor, axis: int | None, group: Any) -> Tensor:
    """Return the parts of all ranks of a group, joined along a dimension. None: the part is all of it."""
    if axis is None or group.size() == 1:
        return half
    parts = [torch.empty_like(half, memory_format=torch.contiguous_format) for _ in range(group.size())]
    torch.distributed.all_gather(parts, half.contiguous(), group=group)
    return torch.cat(parts, axis)
