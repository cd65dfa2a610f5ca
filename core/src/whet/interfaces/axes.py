"""Which ranks of a backend work on the same data: a batch shard is sent once for each data-parallel rank.

    rank   data  tensor      called with      its result
    0      0     0           shard 0          is taken
    1      0     1           None             is dropped
    2      1     0           shard 1          is taken
    3      1     1           None             is dropped

The driver sends a shard to one rank, its owner: tensor, pipeline and context coordinate 0. The other ranks with the
same data coordinate get it inside the backend, e.g. by `torch.distributed.broadcast` in their model-parallel group.
The result of a data-parallel rank is that of its last pipeline stage, tensor and context coordinate 0: this stage
computes losses and logprobs.
"""

from itertools import product
from typing import TYPE_CHECKING, Any

from attrs import astuple, field, frozen

from whet.data.batch import Shards

if TYPE_CHECKING:
    from whet.interfaces.workers import Workers


@frozen
class RankCoordinates:
    """The place of a rank in its backend. Ranks with the same `data` coordinate work on the same batch shard.

    A rank has no expert coordinate: which experts a rank holds does not change which data it gets.
    """

    data: int
    tensor: int = 0
    pipeline: int = 0
    context: int = 0


def _is_grid(instance: object, attribute: Any, ranks: tuple[RankCoordinates, ...]) -> None:
    """Raise `ValueError` unless each place of the grid has exactly one rank."""
    places = [astuple(rank) for rank in ranks]
    sizes = [max(axis) + 1 for axis in zip(*places, strict=True)]
    if sorted(places) != list(product(*map(range, sizes))):
        found = ", ".join(map(str, places))
        wanted = " x ".join(map(str, sizes))
        raise ValueError(f"found ranks at (data, tensor, pipeline, context) {found}; wanted each place of a grid of "
                         f"{wanted} once")  # fmt: skip


@frozen
class ParallelAxes:
    """The coordinates of all ranks of a backend."""

    ranks: tuple[RankCoordinates, ...] = field(validator=_is_grid)

    @classmethod
    def reported_by(cls, workers: "Workers") -> "ParallelAxes":
        """Return what the workers report: each has a method `coordinates() -> RankCoordinates`."""
        return cls(tuple(workers.call("coordinates", phase="start")))

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks. A batch is split into this many shards."""
        return 1 + max(rank.data for rank in self.ranks)

    def scatter(self, workers: "Workers", method: str, *args: Any, phase: str = "") -> list[Any]:
        """Call a method on every rank, wait, and return one result for each data-parallel rank, in order.

        An argument that is `Shards` is split: the owner of a shard gets it, every other rank gets None. All ranks get
        the other arguments.
        """
        columns = [self._column(arg) for arg in args]
        found = workers.scatter(method, list(zip(*columns, strict=True)), phase=phase)
        last, results = max(rank.pipeline for rank in self.ranks), dict(zip(self.ranks, found, strict=True))
        return [results[RankCoordinates(data, pipeline=last)] for data in range(self.data)]

    def _column(self, arg: Any) -> list[Any]:
        """Return an argument for each rank."""
        if not isinstance(arg, Shards):
            return [arg] * len(self.ranks)
        if len(arg) != self.data:
            raise ValueError(f"found {len(arg)} shards, wanted one for each of {self.data} data-parallel ranks")
        shards = list(arg)
        return [shards[rank.data] if rank == RankCoordinates(rank.data) else None for rank in self.ranks]
