"""Outputs of ranks that share sequences: each computes those of its tokens, and all get the outputs of every token.

Every rank computes the same loss of them, and the gradient of each output goes back to the rank that has computed it.
So gradients of weights are summed over these ranks.
"""

from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet_training.layout import Ints


@frozen(eq=False)
class Gathering:
    """Which rank of a group computes which of M outputs."""

    group: Any
    """The process group of the ranks."""
    order: Ints
    """[M] the outputs, ordered by the rank that computes them."""
    counts: tuple[int, ...]
    """Number of outputs that each rank computes."""
    mine: Ints
    """[m] the outputs that this rank computes."""

    @classmethod
    def of(cls, group: Any, owner: Ints) -> "Gathering":
        """Return the gathering of outputs whose ranks are `owner` [M]."""
        import torch.distributed as dist

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=ranks)
        return cls(group, order, tuple(counts.tolist()), order[owner[order] == rank])

    def gather(self, found: Tensor) -> Tensor:
        """Return the outputs of all ranks in order: [m] or [m, K] -> [M] or [M, K]."""
        joined: Tensor = _Gather.apply(found, self)  # type: ignore[no-untyped-call]  # torch's own
        return joined


class _Gather(torch.autograd.Function):
    """Join the outputs of all ranks in their order. The backward pass takes this rank's gradients."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, gathering: Gathering) -> Tensor:
        import torch.distributed as dist

        ctx.gathering = gathering
        most = max(gathering.counts)
        padded = torch.cat([found, found.new_zeros(most - len(found), *found.shape[1:])])
        parts = [torch.empty_like(padded) for _ in gathering.counts]
        dist.all_gather(parts, padded.contiguous(), group=gathering.group)
        joined = torch.cat([part[:count] for part, count in zip(parts, gathering.counts, strict=True)])
        return torch.empty_like(joined).index_copy_(0, torch.from_numpy(gathering.order).to(joined.device), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mine = torch.from_numpy(ctx.gathering.mine).to(gradients[0].device)
        return gradients[0].index_select(0, mine), None
