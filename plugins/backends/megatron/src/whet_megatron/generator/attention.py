"""Attention over a paged cache in plain PyTorch: what flash-attn computes on a GPU, for tests on a CPU.

block table   [rows, blocks]: the numbers of each row's blocks in the cache, in the order of its tokens
cache         [all blocks, tokens of a block, key heads, d]
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def plain_attention(stage: Any) -> Iterator[None]:
    """Answer for flash-attn in all layers of a stage, also where Megatron asks for its version.

    And for einops, which Transformer Engine would install: what Megatron asks of it is to join heads.
    """
    import megatron.core.transformer.attention as module

    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "HAVE_FA3", True))
        stack.enter_context(patch.object(module, "rearrange", lambda tensor, pattern: tensor.flatten(2)))
        for layer in stage.decoder.layers:
            plain = partial(paged_attention, getattr(layer.self_attention, "softmax_scale", None))
            stack.enter_context(patch.object(layer.self_attention, "flash_decode_and_prefill", plain))
        yield


def paged_attention(
    scale: float | None, query: Tensor, key: Tensor, value: Tensor, max_query: int, max_key: int, query_ends: Tensor,
    key_ends: Tensor, lengths: Tensor, table: Tensor, decode_only: bool,
) -> Tensor:  # fmt: skip
    """Return the attention of packed queries [tokens, 1, heads, d] over each row's part of the cache.

    query_ends [rows + 1]: 0 and the ends of each row's queries, which are the last tokens of its sequence; lengths
    [rows]: the tokens of each row in the cache, these included. Padding gets zeros. Further arguments are flash-attn's.
    """
    found = torch.zeros_like(query)
    counts = query_ends[1:] - query_ends[:-1]
    for count in sorted(set(counts.tolist())):
        rows = torch.nonzero(counts == count)[:, 0] if count else counts[:0]
        if len(rows):
            where = (query_ends[rows, None] + torch.arange(count, device=query.device)).long()
            found[where, 0] = _of_rows(query[where, 0], key, value, lengths[rows], table[rows], scale)
    return found


def _of_rows(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """Return [rows, count, heads, d] of rows with equally many queries."""
    longest, count = int(lengths.max()), query.shape[1]
    blocks = table[:, : -(-longest // key.shape[1])].clamp(min=0).long()
    places = torch.arange(longest, device=query.device)
    # Beyond a row's end the cache was never written, and a weight of 0 times what is there need not be 0.
    unwritten = (places >= lengths[:, None])[:, :, None, None]
    keys, values = (
        cache[blocks].flatten(1, 2)[:, :longest].masked_fill(unwritten, 0.0).transpose(1, 2) for cache in (key, value)
    )
    last = lengths[:, None] - count + torch.arange(count, device=query.device)  # the last place that each query sees
    seen = places <= last[:, :, None]
    found = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )  # fmt: skip
    return found.transpose(1, 2)
