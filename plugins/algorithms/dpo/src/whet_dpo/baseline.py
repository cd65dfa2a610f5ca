"""The baseline of KTO: how far the policy has moved from the reference, on responses to other prompts.

    prompts   a   b   c           responses   1   2   3
    pairs     a3  b1  c2          each prompt with the response of the unit before it in the batch

Ethayarajh et al. 2024, section 4.1 (arXiv:2402.01306): z = max(0, mean over these of log pi - log ref).
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.batch import Batch, from_sequences
from whet_ops.reductions import segment_sum

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend


def kl_baseline(backend: "Backend", batch: Batch) -> Any:
    """Return the baseline of the whole batch, the same number for each sequence: [B] float32.

    If all responses belong to one prompt, there is no other prompt, and the baseline is 0.
    """
    borrowed = mismatched(batch)
    if not borrowed["loss_mask"].any():
        return np.zeros(batch.sequences, np.float32)
    policy = backend.score(borrowed, ("logprobs",))["logprobs"]
    reference = backend.score(borrowed, ("logprobs",), "reference")["logprobs"]
    learned = segment_sum(borrowed["loss_mask"].astype(np.int64), borrowed["lengths"]) > 0
    ratios = segment_sum(policy.astype(np.float64) - reference, borrowed["lengths"])[learned]
    return np.full(batch.sequences, max(0.0, float(ratios.mean())), np.float32)


def mismatched(batch: Batch) -> Batch:
    """Return each prompt with the response of the previous unit, in the order of the batch.

    A unit has one sequence, or two if the data are pairs. A result longer than the longest sequence of the batch is
    cut.
    """
    lengths, prompts = np.asarray(batch["lengths"]), np.asarray(batch["prompt_lengths"])
    unit, tokens, mask = (np.asarray(batch[name]) for name in ("unit", "tokens", "loss_mask"))
    starts, count = np.cumsum(lengths) - lengths, batch.sequences
    shift = int(np.unique(unit, return_counts=True)[1].max()) if count else 0
    longest, rows = int(lengths.max(initial=0)), []
    for i in range(count):
        other = (i - shift) % count
        own = slice(starts[i], starts[i] + prompts[i])
        response = slice(starts[other] + prompts[other], starts[other] + lengths[other])
        apart = unit[i] != unit[other]
        rows.append(
            {
                "tokens": np.concatenate([tokens[own], tokens[response]])[:longest],
                "loss_mask": np.concatenate([mask[own], mask[response] & apart])[:longest],
            }
        )
    return from_sequences(rows, prompt_lengths=prompts.tolist(), group=batch["group"].tolist())
