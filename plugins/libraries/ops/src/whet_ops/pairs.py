"""The positions of the two sequences of each preference pair in a batch. NumPy in, NumPy out; torch in, torch out."""

from typing import Any

import numpy as np

from whet_ops.reductions import expand, segment_sum


def pair_positions(unit: Any, chosen: Any) -> tuple[Any, Any]:
    """Return the chosen and the rejected sequence of each pair, in order of unit. unit, chosen [B] -> [P], [P].

    Raises `ValueError` if a unit is not one chosen and one rejected sequence.
    """
    key = unit * 2 + ~chosen
    order = np.argsort(key, kind="stable") if isinstance(key, np.ndarray) else key.argsort(stable=True)
    first, second = order[::2], order[1::2]
    whole = len(first) == len(second) and bool((key[first] + 1 == key[second]).all() and (key[first] % 2 == 0).all())
    if not whole:
        raise ValueError("wanted one chosen and one rejected sequence in each unit")
    return first, second


def shared_length_weights(mask: Any, lengths: Any, unit: Any, chosen: Any, alpha: float) -> Any:
    """Return weights: alpha for tokens beyond the length of the pair's other response, 1 for all others.

    mask [N], lengths, unit, chosen [B] -> [N]. The length of a response is its number of tokens under the mask. Liu et
    al. 2024, "LD-DPO", section 3 (arXiv:2409.06411).
    """
    tokens = segment_sum(mask * 1, lengths)
    first, second = pair_positions(unit, chosen)
    shared = tokens * 0
    shared[first] = shared[second] = tokens[first] + (tokens[second] - tokens[first]) * (tokens[second] < tokens[first])
    place = (mask * 1).cumsum(0) - expand(tokens.cumsum(0) - tokens, lengths)  # 1 at a response's first token
    return 1.0 + (alpha - 1.0) * (place > expand(shared, lengths))
