"""The parallel axes of a backend: which ranks work on the same batch shard.

    rank   data  tensor      argument         result
    0      0     0           shard 0          used
    1      0     1           None             dropped
    2      1     0           shard 1          used
    3      1     1           None             dropped

The driver sends each shard once, to one rank: the owner of the shard. The owner has tensor, pipeline and context
coordinate 0. The backend itself passes the shard on to the other ranks with the same data coordinate, e.g. by
`torch.distributed.broadcast` in their model-parallel group.

The driver uses one result for each data coordinate: the result of the rank in the last pipeline stage that has tensor
and context coordinate 0. The last stage computes losses and logprobs.
"""

from itertools import product
from typing import TYPE_CHECKING, Any

from attrs import astuple, field, frozen

from whet.data.batch import Shards

if TYPE_CHECKING:
    from whet.interfaces.workers import Workers


@frozen
class RankCoordinates:
    """The coordinates of one rank. Ranks with the same `data` coordinate work on the same batch shard.

    A rank has no expert coordinate, because the batch shard of a rank does not depend on the experts that it holds.
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
        """Return the axes that the workers report. Each worker has a method `coordinates() -> RankCoordinates`."""
        return cls(tuple(workers.call("coordinates", phase="start")))

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks. A batch is split into this many shards."""
        return 1 + max(rank.data for rank in self.ranks)

    def scatter(self, workers: "Workers", method: str, *args: Any, phase: str = "") -> list[Any]:
        """Call a method on every rank, wait, and return one result for each data-parallel rank, in order.

        An argument of type `Shards` is split: the owner of a shard receives the shard, and every other rank receives
        None. Every other argument is sent to all ranks.
        """
        columns = [self._column(arg) for arg in args]
        found = workers.scatter(method, list(zip(*columns, strict=True)), phase=phase)
        last, results = max(rank.pipeline for rank in self.ranks), dict(zip(self.ranks, found, strict=True))
        return [results[RankCoordinates(data, pipeline=last)] for data in range(self.data)]

    def _column(self, arg: Any) -> list[Any]:
        """Return the value of one argument for each rank."""
        if not isinstance(arg, Shards):
            return [arg] * len(self.ranks)
        if len(arg) != self.data:
            raise ValueError(f"found {len(arg)} shards, wanted one for each of {self.data} data-parallel ranks")
        shards = list(arg)
        return [shards[rank.data] if rank == RankCoordinates(rank.data) else None for rank in self.ranks]
