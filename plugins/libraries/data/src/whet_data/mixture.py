"""The order in which the records of several files are trained on: a function of the run's seed and of the epoch.

    without weights   an epoch has every record of every file once, in an order of its own
    with weights      an epoch has as many records as all files together; each file contributes its share

A file with a weight is read again and again, each time in an order of its own. The next epoch continues where the last
one stopped, so a large file of small weight is seen in full over several epochs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from whet.data import randomness
from whet.errors import DataError


@frozen
class Mixture:
    """The files of a run, concatenated."""

    seed: int
    sizes: tuple[int, ...]
    """Number of records of each file."""
    shares: tuple[int, ...] | None = None
    """Number of records that each file contributes to an epoch. None: all of them, once."""

    def __len__(self) -> int:
        return sum(self.sizes)

    def order(self, epoch: int) -> Any:
        """Return the records of an epoch in order: [len(self)] positions in the concatenated files."""
        if self.shares is None:
            return randomness.generator(self.seed, "data", epoch).permutation(len(self))
        starts = np.cumsum([0, *self.sizes])
        parts = [starts[i] + self._drawn(i, epoch * share, share) for i, share in enumerate(self.shares)]
        return np.concatenate(parts)[randomness.generator(self.seed, "mixture", epoch).permutation(len(self))]

    def _drawn(self, file: int, begin: int, count: int) -> Any:
        """Return `count` records of one file, from position `begin` of its endless sequence of shuffled passes."""
        size = self.sizes[file]
        passes, places = np.divmod(np.arange(begin, begin + count), size)
        found = np.empty(count, np.int64)
        for number in np.unique(passes):
            order = randomness.generator(self.seed, "data", file, int(number)).permutation(size)
            found[passes == number] = order[places[passes == number]]
        return found


def mixture(seed: int, sizes: Sequence[int], weights: Sequence[float | None], names: Sequence[str]) -> Mixture:
    """Return the mixture of files with these numbers of records and weights. Either every weight is None, or none is.

    Raises `DataError` that names a file whose weight is too small for one record in an epoch.
    """
    given = [weight for weight in weights if weight is not None]
    if len(given) != len(sizes) or not given:
        return Mixture(seed, tuple(sizes))
    shares = _apportioned(sum(sizes), given)
    for name, share, weight, size in zip(names, shares, given, sizes, strict=True):
        if not size:
            raise DataError(f"{name} has the weight {weight:g} and no record that can be used; take it out")
        if not share:
            raise DataError(
                f"{name} has the weight {weight:g} of {sum(given):g}, which is less than one of the {sum(sizes):,} "
                "records of an epoch; raise its weight"
            )
    return Mixture(seed, tuple(sizes), tuple(shares))


def _apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """Split a total by weights into integers: each part is its share, rounded down or up (largest remainders)."""
    scaled = [weight / max(weights) for weight in weights]  # so that their sum is finite
    exact = [total * (weight / sum(scaled)) for weight in scaled]
    parts = [int(share) for share in exact]
    largest = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in largest[: total - sum(parts)]:
        parts[i] += 1
    return parts
