"""The order of records: a function of seed and epoch alone, and shares of files that hold over every epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.errors import DataError
from whet_data.mixture import mixture

NAMES = ("a", "b", "c")


def mixed(sizes, weights, seed=0):
    return mixture(seed, sizes, weights, NAMES[: len(sizes)])


def of_files(order, sizes):
    """Return which file each record of an order is of."""
    return np.searchsorted(np.cumsum(sizes), order, "right")


def test_without_weights_an_epoch_has_every_record_once():
    orders = [mixed((3, 5), (None, None)).order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_with_weights_each_file_gives_its_share_of_every_epoch():
    sizes = (100, 20, 30)
    found = mixed(sizes, (1.0, 3.0, 2.0))
    for epoch in range(5):
        order = found.order(epoch)
        assert len(order) == 150
        assert np.bincount(of_files(order, sizes)).tolist() == [25, 75, 50]


def test_files_are_mixed_rather_than_joined():
    order = of_files(mixed((500, 500), (1.0, 1.0)).order(0), (500, 500))
    halves = order[:500].mean(), order[500:].mean()
    assert all(0.4 < half < 0.6 for half in halves)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.5, 4)), min_size=1, max_size=3), st.integers(0, 5))
def test_a_file_shows_all_its_records_before_one_comes_again(files, seed):
    sizes, weights = zip(*files, strict=True)
    try:
        found = mixed(sizes, weights, seed)
    except DataError:  # a file whose share is less than one record
        return
    walked = np.concatenate([found.order(epoch) for epoch in range(6)])
    assert len(walked) == 6 * sum(sizes)
    for file, size in enumerate(sizes):
        own = walked[of_files(walked, sizes) == file]
        counts = np.bincount(own - sum(sizes[:file]), minlength=size)
        # an epoch is shuffled whole, so within one a record may come before the last of the pass before it
        assert counts.max() - counts.min() <= 1
        assert len(own) == 6 * (found.shares or (0,) * 3)[file]


def test_an_order_does_not_depend_on_those_before_it_and_each_seed_has_its_own():
    one, two = mixed((10, 30), (3.0, 1.0)), mixed((10, 30), (3.0, 1.0))
    forwards = [one.order(epoch).tolist() for epoch in range(4)]
    assert forwards == [two.order(epoch).tolist() for epoch in (3, 2, 1, 0)][::-1]
    assert mixed((10, 30), (3.0, 1.0), seed=1).order(0).tolist() != forwards[0]


def test_a_share_of_less_than_one_record_is_refused_by_name():
    with pytest.raises(DataError, match=r"b has the weight 0\.001 of 1\.001, which is less than one of the 20 records"):
        mixed((10, 10), (1.0, 0.001))
    assert mixed((10, 10), (1e308, 1e308)).shares == (10, 10)
    with pytest.raises(DataError, match=r"a has the weight 1 and no record that can be used"):
        mixed((0, 10), (1.0, 1.0))
