import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.ops.pairs import pair_positions


@given(units=st.lists(st.integers(-5, 1000), unique=True, max_size=8), data=st.data())
def test_pairs_are_found_in_any_order(units, data):
    members = data.draw(st.permutations([(unit, chosen) for unit in units for chosen in (True, False)]))
    unit = np.array([unit for unit, _ in members], np.int64)
    chosen = np.array([chosen for _, chosen in members], bool)
    one, other = pair_positions(unit, chosen)
    assert [members[i] for i in one] == [(unit, True) for unit in sorted(units)]
    assert [members[i] for i in other] == [(unit, False) for unit in sorted(units)]
    both = pair_positions(torch.from_numpy(unit), torch.from_numpy(chosen))
    assert [part.tolist() for part in both] == [one.tolist(), other.tolist()]


@pytest.mark.parametrize(
    ("unit", "chosen"),
    [([0], [1]), ([0, 1], [1, 0]), ([0, 0], [1, 1]), ([0, 0], [0, 0]), ([0, 0, 0], [1, 0, 0]), ([2] * 4, [1, 0, 1, 0])],
)
def test_units_that_are_no_pairs_are_refused(unit, chosen):
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        pair_positions(np.array(unit), np.array(chosen, bool))
