"""Attention of a last layer of which only a few positions are read.

A reward model reads one position of a response. In the last layer only its query is needed: it attends to the prompt
and to the response before it. The keys are gathered for each query, which is cheap while there are few of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet_fsdp2.blocks import AttentionPlan
from whet_training.layout import Ints

MOST = 4
"""If more keys would be gathered than this many times the tokens of the row, all queries are computed."""


def keys_of(plan: AttentionPlan, rows: Ints) -> tuple[Ints, NDArray[np.bool_]] | None:
    """Return the tokens that each position attends to, padded: [R, K], and which are real. None: they are too many."""
    ends = np.cumsum(plan.lengths)
    segment = np.searchsorted(ends, rows, side="right")
    start, prefix = (ends - plan.lengths)[segment], plan.prefix[segment]
    behind = np.where(prefix >= 0, plan.lengths[prefix], 0)
    count = behind + rows - start + 1
    if len(rows) * int(count.max()) > MOST * int(ends[-1]):
        return None
    column = np.arange(int(count.max()))
    of_prefix = (ends - plan.lengths)[prefix][:, None] + column
    tokens = np.where(column < behind[:, None], of_prefix, (start - behind)[:, None] + column)
    real = column < count[:, None]
    return np.where(real, tokens, rows[:, None]), real


def attend_few(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, keys: tuple[Ints, NDArray[np.bool_]], scale: float
) -> Tensor:
    """Return attention at `rows` [R], 0 elsewhere.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].
    """
    heads, tokens, dim, kv_heads = query.shape[1], query.shape[2], query.shape[3], key.shape[1]
    index, real = (torch.from_numpy(array).to(query.device) for array in keys)

    def gathered(x: Tensor) -> Tensor:
        """Return what each query reads: [R, kv_heads, K, d]."""
        found = x[0].transpose(0, 1).index_select(0, index.view(-1)).float()
        return found.view(*index.shape, kv_heads, dim).transpose(1, 2)

    q = query[0].transpose(0, 1).index_select(0, rows).float().view(len(rows), kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(q, gathered(key).transpose(2, 3)) * scale
    chances = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    out = torch.matmul(chances, gathered(value)).view(len(rows), heads, dim)
    return out.new_zeros(tokens, heads, dim).index_copy(0, rows, out)[None].to(query.dtype)
