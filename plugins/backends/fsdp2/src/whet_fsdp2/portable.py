"""Packed attention with PyTorch's public attention function only.

It computes what `whet_fsdp2.varlen` has no kernel for, and windows on CPUs.

The keys of a completion's row begin with a copy of its prefix, and a mask hides the padding:

    queries      a a a          keys      p p p . | a a a       (`.`: padding, hidden by the mask)

So the keys of a prompt are read once for each completion, not once for each group. The dense layers still compute each
prompt once. Autograd computes the backward pass, with any kernel that `scaled_dot_product_attention` chooses.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from whet_training.layout import Ints, bins


@frozen(eq=False)
class RowBlock:
    """R segments that one call of the attention function computes."""

    queries: Tensor
    """[R, Q] tokens. Padding repeats a token of the same segment."""
    keys: Tensor
    """[R, P + Q] tokens of the prefix, then tokens of the segment."""
    mask: Tensor | None
    """[R, 1, Q, P + Q] true where a query sees a key. None: causal attention."""
    real: Tensor
    """Positions among the R * Q queries that are not padding."""


@frozen(eq=False)
class RowPlan:
    """All blocks of a packed row."""

    blocks: tuple[RowBlock, ...]
    back: Tensor
    """[T] the index of each token among the real queries of all blocks."""


def plan_rows(lengths: Ints, prefix: Ints, device: torch.device, window: int | None = None) -> RowPlan:
    """Return the blocks for segments of these lengths [S]. prefix [S]: the prefix segment of each segment, or -1.

    `window`: the number of keys that a query sees, itself included. None: all.
    """
    place = np.cumsum(lengths) - lengths
    blocks, order = [], []
    for members in (np.flatnonzero(prefix < 0), np.flatnonzero(prefix >= 0)):
        for found in bins(lengths[members]):
            chosen = members[found.members]
            block, tokens = _block(chosen, found.width, lengths, prefix, place, device, window)
            blocks.append(block)
            order.append(tokens)
    back = np.argsort(np.concatenate(order), kind="stable")
    return RowPlan(tuple(blocks), torch.from_numpy(back).to(device))


def _block(
    chosen: Ints, width: int, lengths: Ints, prefix: Ints, place: Ints, device: torch.device, window: int | None
) -> tuple[RowBlock, Ints]:
    column = np.arange(width)
    queries = place[chosen, None] + np.minimum(column, lengths[chosen, None] - 1)
    real = np.flatnonzero(column < lengths[chosen, None])
    keys, mask = queries, None
    causal: Any = np.tri(width, dtype=bool)
    if window is not None:
        causal = causal & ~np.tri(width, k=-window, dtype=bool)
        mask = np.tile(causal, (len(chosen), 1, 1, 1)) if window < width else None
    if prefix[chosen[0]] >= 0:
        before = prefix[chosen]
        span = np.arange(int(lengths[before].max()))
        keys = np.concatenate([place[before, None] + np.minimum(span, lengths[before, None] - 1), queries], 1)
        seen = np.broadcast_to((span < lengths[before, None])[:, None], (len(chosen), width, len(span)))
        if window is not None:  # a query comes after its whole prefix
            at = lengths[before, None, None] + column[:, None]
            seen = seen & (at - span < window)
        causal = np.broadcast_to(causal, (len(chosen), width, width))
        mask = np.concatenate([seen, causal], 2)[:, None]

    def tensor(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    block = RowBlock(tensor(queries), tensor(keys), None if mask is None else tensor(mask), tensor(real))
    return block, queries.ravel()[real]


def attend_rows(query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scale: float) -> Tensor:
    """Return attention within the segments of a row.

    query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d].
    """
    found = []
    for block in plan.blocks:
        out = F.scaled_dot_product_attention(
            query[block.queries].transpose(1, 2),
            key[block.keys].transpose(1, 2),
            value[block.keys].transpose(1, 2),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        found.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.real))
    return torch.cat(found).index_select(0, plan.back)
