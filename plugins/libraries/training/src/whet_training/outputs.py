"""Outputs of a forward pass: what they need of a micro-batch, and their places in it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.batch import Batch


def ids_at(batch: Batch, where: Any, device: torch.device) -> Tensor | None:
    """Return the further tokens at each target position, from the column `topk_ids`: [M, K]. None: there is none."""
    if "topk_ids" not in batch:
        return None
    return torch.from_numpy(np.asarray(batch["topk_ids"], np.int64)[where]).to(device)


def temperatures(batch: Batch, sequence: Any, device: torch.device) -> Tensor | None:
    """Return the temperature of each target from its sequence [M]: [M] float32. None: 1 everywhere."""
    if "temperature" not in batch:
        return None
    temperature = np.asarray(batch["temperature"], np.float32)
    temperature = np.where(temperature > 0, temperature, np.float32(1))  # greedy: logprobs are those at 1
    if (temperature == 1).all():
        return None
    return torch.from_numpy(temperature[sequence]).to(device)


def spread(found: Mapping[str, Tensor], where: Tensor, count: int) -> dict[str, Tensor]:
    """Return outputs of targets, [M] or [M, K], at their places in a micro-batch: [N] or [N, K], 0 elsewhere.

    `where` [M] are the places among the `count` tokens. If it is empty, values are dropped: the pass had no targets.
    """
    if not len(where):
        return {name: values.new_zeros(count, *values.shape[1:]) for name, values in found.items()}
    return {
        name: values.new_zeros(count, *values.shape[1:]).index_copy(0, where, values) for name, values in found.items()
    }
