"""Where the two sequences of each preference pair lie in a batch. NumPy in, NumPy out; torch in, torch out."""

from typing import Any

import numpy as np


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
