"""Reduces per-token losses to one number, and computes what to divide it by. NumPy or torch.

    token      sum over all tokens / number of tokens                  DAPO, section 3.3 (arXiv:2503.14476)
    sequence   mean over sequences of each one's mean over tokens      GRPO, equation 3 (arXiv:2402.03300)
    constant   sum over all tokens / (sequences x max_length)          Dr. GRPO, section 3.2 (arXiv:2503.20783)

Counted are the sequences with a token under the mask. A sequence without one was empty from the beginning, or was
masked later; `count_empty` and `count_masked` decide whether these two kinds count too. `count` reads only the mask, so
it is known before any forward pass and adds up over micro-batches and ranks. A conversation of several sequences, which
a chat template makes that rewrites history, counts once: each of its sequences counts as its share of the
conversation's trained tokens. So it has the loss of one sequence with all of these tokens. With a `max_length` of 1,
`constant` is the mean of the sequences' sums.
"""

from typing import Any, Literal

from whet_ops.algorithms.config import AverageConfig
from whet_ops.reductions import segment_mean, segment_sum

Aggregation = Literal["token", "sequence", "constant"]


def total(values: Any, mask: Any, lengths: Any, aggregation: Aggregation, share: Any = None) -> Any:
    """Return the sum to be averaged. values [N], 0 where mask [N] is false; lengths [B] -> a number.

    `share` [B] is what each sequence is of its conversation, if some conversations have several.
    """
    if aggregation != "sequence":
        return values.sum()
    means = segment_mean(values, lengths, mask)
    return (means if share is None else means * share).sum()


def count(
    mask: Any,
    lengths: Any,
    aggregation: Aggregation,
    max_length: int = 1,
    count_empty: bool = False,
    count_masked: bool | None = None,
    sampled: Any = None,
    share: Any = None,
) -> Any:
    """Return the number that the total is divided by. mask [N] bool, lengths [B] -> a number.

    `sampled` [N] bool marks the tokens that the model produced. A sequence without any of them is empty; one that has
    some, but none under the mask, is masked. Without `sampled`, every sequence that has no token under the mask is
    empty. `count_masked` None: as `count_empty`. TRL counts both kinds, NeMo RL the empty ones.
    """
    if aggregation == "token":
        return mask.sum()
    count_masked = count_empty if count_masked is None else count_masked
    counted = segment_sum(mask + 0, lengths) > 0
    if count_empty or count_masked:
        left = ~counted
        masked = left & (segment_sum(sampled + 0, lengths) > 0) if sampled is not None else left & False
        counted = counted | (left & ~masked if count_empty else masked & False) | (masked & count_masked)
    sequences = counted.sum() if share is None else (counted * share).sum()
    return sequences * max_length if aggregation == "constant" else sequences


def share_of(batch: Any) -> Any:
    """Return the column `share` [B], or None if each conversation is one sequence."""
    return batch["share"] if "share" in batch else None  # noqa: SIM401 - a batch has no `get`


def counted(batch: Any, config: AverageConfig) -> Any:
    """Return the number that a loss over a batch's trained tokens is divided by, as its section states.

    The column `version`, if the batch has it, marks the tokens that the model produced.
    """
    sampled = batch["version"] >= 0 if "version" in batch else None
    return count(
        batch["loss_mask"],
        batch["lengths"],
        config.aggregation,
        config.max_length,
        config.count_empty,
        config.count_masked,
        sampled,
        share_of(batch),
    )
