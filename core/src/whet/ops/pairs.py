"""Where the two sequences of each preference pair lie in a batch. NumPy in, NumPy out; torch in, torch out."""

from typing import Any

import numpy as np

from whet.ops.reductions import expand, segment_sum


def pair_positions(unit: Any, chosen: Any) -> tuple[Any, Any]:
    """Find the chosen and the rejected sequence of each pair, in order of unit. unit, chosen [B] -> [P], [P].

    Raises `ValueError` where a unit is not one chosen and one rejected sequence.
    """
    key = unit * 2 + ~chosen
    order = np.argsort(key, kind="stable") if isinstance(key, np.ndarray) else key.argsort(stable=True)
    first, second = order[::2], order[1::2]
    whole = len(first) == len(second) and bool((key[first] + 1 == key[second]).all() and (key[first] % 2 == 0).all())
    if not whole:
        raise ValueError("wanted one chosen and one rejected sequence in each unit")
    return first, second


def shared_length_weights(mask: Any, lengths: Any, unit: Any, chosen: Any, alpha: float) -> Any:
    """Weigh the tokens by which an answer is longer than the other of its pair by alpha, all others by 1.

    mask [N], lengths, unit, chosen [B] -> [N]. Lengths of answers are counted in tokens under the mask.
    Liu et al. 2024, "LD-DPO", section 3 (arXiv:2409.06411).
    """
    tokens = segment_sum(mask * 1, lengths)
    first, second = pair_positions(unit, chosen)
    shared = tokens * 0
    shared[first] = shared[second] = tokens[first] + (tokens[second] - tokens[first]) * (tokens[second] < tokens[first])
    place = (mask * 1).cumsum(0) - expand(tokens.cumsum(0) - tokens, lengths)  # 1 at an answer's first token
    return 1.0 + (alpha - 1.0) * (place > expand(shared, lengths))
