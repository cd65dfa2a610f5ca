"""From a loss per token to one number, and what to divide it by. NumPy or torch.

    token      sum over all tokens / number of tokens                  DAPO, section 3.3 (arXiv:2503.14476)
    sequence   mean over sequences of each one's mean over tokens      GRPO, equation 3 (arXiv:2402.03300)
    constant   sum over all tokens / (sequences x max_length)          Dr. GRPO, section 3.2 (arXiv:2503.20783)

Sequences are those with a token under the mask, unless `count_empty`. `count` looks at the mask alone, so that it is
known before any forward pass and adds up over micro-batches and ranks. With a `max_length` of 1 `constant` is the mean
of sums.
"""

from typing import Any, Literal

from whet.ops.reductions import segment_mean, segment_sum

Aggregation = Literal["token", "sequence", "constant"]


def total(values: Any, mask: Any, lengths: Any, aggregation: Aggregation) -> Any:
    """Sum what is to be averaged. values [N], 0 where mask [N] is false; lengths [B] -> a number."""
    return segment_mean(values, lengths, mask).sum() if aggregation == "sequence" else values.sum()


def count(mask: Any, lengths: Any, aggregation: Aggregation, max_length: int = 1, count_empty: bool = False) -> Any:
    """Count what the total is divided by. mask [N] bool, lengths [B] -> a number.

    `count_empty`: sequences without a token under the mask count as well, as in TRL.
    """
    if aggregation == "token":
        return mask.sum()
    sequences = mask.sum() * 0 + len(lengths) if count_empty else (segment_sum(mask + 0, lengths) > 0).sum()
    return sequences * max_length if aggregation == "constant" else sequences
