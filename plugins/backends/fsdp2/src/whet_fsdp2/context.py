"""Context parallelism: ranks share the tokens of a packed row, and exchange heads for tokens around the attention.

    rank 0   tokens 0..T/2   --+   all-to-all    +-- all tokens, heads 0..h/2 --+  attention,    +-- tokens 0..T/2
    rank 1   tokens T/2..T   --+                 +-- all tokens, heads h/2..h --+  all-to-all    +-- tokens T/2..T

Everything outside of the attention is computed token by token, so it needs no exchange. The row is padded to a multiple
of the ranks; padding takes no part in the attention. Jacobs et al. 2023 (arXiv:2309.14509), section 3.

The loss sees whole sequences: `Piece.gather` joins the outputs of all ranks. Every rank computes the same loss, and the
gradient of each output goes back to the rank that has computed it. So gradients are summed over these ranks.
"""

from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet_training.gathering import Gathering
from whet_training.layout import Ints


@frozen(eq=False)
class Piece:
    """A packed row, and the piece of it that this rank has."""

    group: Any
    """The process group of the ranks that share the row."""
    begin: int
    end: int
    """Its tokens in the padded row."""
    targets: Gathering
    """Which rank computes which target."""

    @classmethod
    def of(cls, group: Any, tokens: int, source: Ints) -> "Piece":
        """Return the piece of this rank. `source` [M] is the place in the row from which each target is predicted."""
        import torch.distributed as dist

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        width = -(-tokens // ranks)
        return cls(group, rank * width, (rank + 1) * width, Gathering.of(group, source // width))

    @property
    def mine(self) -> Ints:
        """Return the targets that this rank computes: [m]."""
        return self.targets.mine

    def cut(self, row: Ints) -> Ints:
        """Return this rank's part of per-token values of the row [T]. Padding is 0."""
        found = row[self.begin : self.end]
        return np.concatenate([found, np.zeros(self.end - self.begin - len(found), row.dtype)])

    def gather(self, found: Tensor) -> Tensor:
        """Return the outputs at all targets: [m] or [m, K] -> [M] or [M, K]."""
        return self.targets.gather(found)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange tokens for heads: [W / ranks, heads, d] -> [W, heads / ranks, d]."""
        swapped: Tensor = _Swap.apply(x, self.group, True)  # type: ignore[no-untyped-call]  # torch's own
        return swapped

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange heads for tokens, the inverse of `to_heads`."""
        swapped: Tensor = _Swap.apply(x, self.group, False)  # type: ignore[no-untyped-call]  # torch's own
        return swapped

    def repeated(self, x: Tensor) -> Tensor:
        """Return keys or values with at least one head for each rank. x [T, kv_heads, d]."""
        ranks = len(self.targets.counts)
        return x.repeat_interleave(ranks // x.shape[1], 1) if x.shape[1] < ranks else x


class _Swap(torch.autograd.Function):
    """[S, H * n, d] <-> [S * n, H, d] over n ranks. The backward pass is the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        import torch.distributed as dist

        ctx.group, ctx.to_heads, ranks = group, to_heads, dist.get_world_size(group)
        split = torch.unflatten(x, 1 if to_heads else 0, (ranks, -1))
        x = (split.transpose(0, 1) if to_heads else split).contiguous()
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=group)
        return found.flatten(0, 1) if to_heads else found.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back: Tensor = _Swap.apply(gradients[0], ctx.group, not ctx.to_heads)  # type: ignore[no-untyped-call]
        return back, None, None
