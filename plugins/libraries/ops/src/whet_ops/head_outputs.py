"""The outputs of a language model's head that backends give, from its hidden states."""

from __future__ import annotations  # the site is built without torch

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.errors import WhetError
from whet_ops.logprobs import MATRIX, distribution_kl, token_logprobs, top_logprobs


def head_outputs(
    outputs: Sequence[str], hidden: Tensor, weight: Tensor, targets: Tensor, ids: Tensor | None, terms: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the wanted outputs of a head and always `logprobs`: [M] or [M, K] each. Others than these are left out:
    `logprobs`, `entropy`, `logprobs_at`, `topk_ids:K` and `topk_logprobs:K`.

    hidden [M, H], weight [V, H], targets [M], ids [M, K] of the column `topk_ids`. `terms` are further arguments of
    `token_logprobs`: `temperature`, `bias`, `vocabulary`, `chunk`, `rule`.
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


def divergences(
    outputs: Sequence[str], hidden: Tensor, weight: Tensor, teacher: Mapping[str, Any], terms: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the wanted divergences between a model and a teacher: [M] each, of `kl_forward`, `kl_reverse` and
    `jensen_shannon:B`.

    `teacher`: its `hidden` [M, H'], `weight` [V, H'] and, if there is one, `bias` and `rule`. `terms` are further
    arguments of `whet_ops.logprobs.distribution_kl`.
    """

    def computed(beta: float | None = None) -> tuple[Tensor, ...]:
        return distribution_kl(
            hidden, weight, teacher["hidden"], teacher["weight"], other_bias=teacher.get("bias"),
            other_rule=teacher.get("rule", MATRIX), beta=beta, **terms,
        )  # fmt: skip

    found: dict[str, Tensor] = {}
    for name in wanted_divergences(outputs):
        if name.startswith("jensen_shannon:"):
            found[name] = computed(float(name.partition(":")[2]))[0]
        elif name not in found:
            found |= dict(zip(("kl_forward", "kl_reverse"), computed(), strict=True))
    return found


def wanted_divergences(outputs: Sequence[str]) -> list[str]:
    """Return the outputs for which a teacher is needed."""
    return [name for name in outputs if name in ("kl_forward", "kl_reverse") or name.startswith("jensen_shannon:")]
