"""Outputs of a forward pass: from hidden states and a head to logprobs, and back to the tokens of a micro-batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.data.batch import Batch
from whet.errors import WhetError
from whet_ops.logprobs import token_logprobs, top_logprobs


def head_outputs(
    outputs: Sequence[str], hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor | None, terms: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the wanted outputs of a head and always `logprobs`: [M] or [M, K] each. Others than these are left out:
    `logprobs`, `entropy`, `logprobs_at`, `topk_ids:K` and `topk_logprobs:K`.

    hidden [M, H], weight [V, H], targets [M], ids [M, K] of the column `topk_ids`. `terms` are further arguments of
    `whet_ops.logprobs.token_logprobs`: `temperature`, `bias`, `vocabulary`, `chunk`.
    """
    found = _at_tokens(outputs, hidden, weight, targets, ids, terms)
    for name in outputs:
        kind, _, k = name.partition(":")
        if kind in ("topk_ids", "topk_logprobs") and name not in found:
            best, logprobs = top_logprobs(hidden, weight, int(k), **terms)
            found |= {f"topk_ids:{k}": best.int(), f"topk_logprobs:{k}": logprobs}
    return found


def _at_tokens(
    outputs: Sequence[str], hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor | None, terms: dict[str, Any]
) -> dict[str, Tensor]:
    """Return `logprobs` and, from the same pass over the logits, `logprobs_at` and `entropy` if they are wanted."""
    if "logprobs_at" in outputs:
        if ids is None:
            raise WhetError("the output logprobs_at is of the tokens in the column topk_ids, which is not there")
        targets = torch.cat([targets[:, None], ids], 1)
    logprobs, entropy = token_logprobs(hidden, weight, targets, entropy="entropy" in outputs, **terms)
    found = {"logprobs": logprobs} if logprobs.ndim == 1 else {}
    if logprobs.ndim == 2:
        found = {"logprobs": logprobs[:, 0], "logprobs_at": logprobs[:, 1:]}
    return found if entropy is None else {**found, "entropy": entropy}


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
