import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet_ops.pairs import pair_positions, shared_length_weights


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


@pytest.mark.parametrize("how", [np.array, torch.tensor])
def test_tokens_beyond_the_shorter_response_weigh_alpha(how):
    # pair 3: responses of 3 and 1 learned tokens, with one between that is not learned; pair 1: of 2 and 2
    lengths, unit, chosen = how([2, 5, 3, 3]), how([3, 3, 1, 1]), how([False, True, False, True])
    mask = how([False, True, False, True, False, True, True, True, True, False, False, True, True])
    weights = shared_length_weights(mask, lengths, unit, chosen, 0.25)
    learned = [float(weight) for weight, inside in zip(weights, mask, strict=True) if inside]
    assert learned == [1.0, 1.0, 0.25, 0.25, 1.0, 1.0, 1.0, 1.0]
