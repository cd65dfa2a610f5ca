"""Conversions between per-sequence [B] and per-token [N] columns. NumPy in, NumPy out; torch in, torch out."""

from typing import Any

import numpy as np


def expand(values: Any, lengths: Any) -> Any:
    """Repeat each sequence's value for each of its tokens. values [B], lengths [B] -> [N]."""
    if isinstance(values, np.ndarray):
        return np.repeat(values, lengths)
    return values.repeat_interleave(lengths)


def of_tokens(batch: Any, name: str) -> Any:
    """Return a column of a batch for each token [N], whether the column is per token or per sequence."""
    return batch[name] if name in batch.per_token else expand(batch[name], batch["lengths"])


def moved(batch: Any, name: str) -> Any:
    """Return which sequences [B] have a nonzero number in a column; in a per-token column, at a trained token."""
    if name in batch.per_sequence:
        return batch[name] != 0
    there = batch["loss_mask"] & (batch[name] != 0)
    return segment_sum(there.astype("int64") if isinstance(there, np.ndarray) else there.long(), batch["lengths"]) > 0


def segment_sum(values: Any, lengths: Any) -> Any:
    """Sum each sequence's tokens. values [N], lengths [B] -> [B]; an empty sequence gives 0."""
    if isinstance(values, np.ndarray):
        owner = np.repeat(np.arange(len(lengths)), lengths)
        return np.bincount(owner, weights=values, minlength=len(lengths)).astype(values.dtype, copy=False)
    import torch

    index = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    return values.new_zeros(len(lengths)).index_add(0, index, values)


def segment_mean(values: Any, lengths: Any, mask: Any) -> Any:
    """Average each sequence's tokens where mask [N] is true. values [N] -> [B]; no token gives 0."""
    mask = mask.astype(values.dtype) if isinstance(values, np.ndarray) else mask.to(values.dtype)
    count = segment_sum(mask, lengths)
    floor = np.maximum(count, 1) if isinstance(values, np.ndarray) else count.clamp(min=1)
    # `where` rather than a product: a masked token that is infinite must not become NaN.
    if isinstance(values, np.ndarray):
        kept = np.where(mask > 0, values, 0)
    else:
        kept = values.where(mask > 0, values.new_zeros(()))
    return segment_sum(kept, lengths) / floor
