"""The rows of a head on one rank, where tensor parallel ranks share the vocabulary.

A distribution over the vocabulary needs few numbers of the other ranks: the largest logit, the sum of exponentials, and
the logit of the target. So logits are never gathered. Narayanan et al. 2021 (arXiv:2104.04473), section 2.3.
"""

from __future__ import annotations  # the site is built without torch

from typing import Any

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Vocabulary:
    """Rows `first` to `first` + V' of a head of `size` rows. The ranks of `group` hold the others, in order."""

    size: int = 0
    first: int = 0
    group: Any = None
    """The process group. None: this rank holds the whole head."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Return logprobs over the whole vocabulary at this rank's rows: [M, V'] float32 -> [M, V']."""
        if self.group is None:
            return torch.log_softmax(logits, -1)
        import torch.distributed as dist

        highest = logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        shifted = logits - highest
        # Every rank needs the sum, so its gradient comes from every rank.
        sums = self.total(self.shared(shifted.exp().sum(-1, keepdim=True)))
        return shifted - sums.log()

    def pick(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return the values of target tokens, which one rank has each: [M, V'], int64 [M, K] -> [M, K]."""
        if self.group is None:
            return values.gather(1, targets)
        rows, here = self.rows(targets, values.shape[1])
        return self.total(values.gather(1, rows) * here)

    def rows(self, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the rows of target tokens, 0 for those of other ranks, and whether they are here as 1 or 0."""
        rows = targets - self.first
        here = (rows >= 0) & (rows < count)
        return rows * here, here.float()

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over ranks. Each rank's gradient is that of the sum."""
        if self.group is None:
            return values
        found: Tensor = _Total.apply(values, self.group)  # type: ignore[no-untyped-call]  # torch's own
        return found

    def shared(self, values: Tensor) -> Tensor:
        """Return values unchanged. Their gradient is summed over ranks, each of which uses them in its own rows."""
        if self.group is None:
            return values
        found: Tensor = _Shared.apply(values, self.group)  # type: ignore[no-untyped-call]  # torch's own
        return found

    def top(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest values of the whole vocabulary and their tokens: [M, V'] -> [M, k], int64 [M, k]."""
        found = values.topk(min(k, values.shape[1]))
        if self.group is None:
            return found.values, found.indices
        import torch.distributed as dist

        ranks = dist.get_world_size(self.group)
        room = values.new_full((len(values), k), -torch.inf), found.indices.new_zeros(len(values), k)
        room[0][:, : found.values.shape[1]] = found.values
        room[1][:, : found.indices.shape[1]] = found.indices + self.first
        parts = [[torch.empty_like(one) for _ in range(ranks)] for one in room]
        for one, every in zip(room, parts, strict=True):
            dist.all_gather(every, one, group=self.group)
        best = torch.cat(parts[0], 1).topk(k)
        return best.values, torch.cat(parts[1], 1).gather(1, best.indices)


WHOLE = Vocabulary()
"""A head that one rank holds."""


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        found = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        import torch.distributed as dist

        found = gradients[0].contiguous().clone()
        dist.all_reduce(found, group=ctx.group)
        return found, None
