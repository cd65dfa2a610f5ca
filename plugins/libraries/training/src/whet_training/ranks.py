"""The ranks of a backend join a process group, pass batch shards on, and sum numbers. And a stopwatch for phases."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch

from whet.data import metrics
from whet.data.metrics import Metric
from whet.errors import ConfigError, WhetError
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.workers import WorkerRank
from whet.runtime.wire import decode, encode

T = TypeVar("T")
_PATIENCE = timedelta(hours=2)
"""How long an operation of NCCL waits for other ranks, in place of ten minutes: one of them may be writing a large
model. A rank that is lost ends the run by the deadlines of calls.
"""
_MADE: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Process groups and meshes which all roles in this process share, of each default group: they end with it."""


class Grid(Protocol):
    """Where each rank stands."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a rank."""


def members(grid: Grid, rank: int, *axes: str) -> list[int]:
    """Return the ranks that differ from a rank in the given coordinates only, and the rank itself, in order."""
    mine = attrs.asdict(grid.coordinates(rank))

    def alike(other: int) -> bool:
        found = attrs.asdict(grid.coordinates(other))
        return all(found[axis] == mine[axis] for axis in mine if axis not in axes)

    return [other for other in range(grid.ranks) if alike(other)]


SHARING = ("tensor", "pipeline", "context")
"""Ranks that differ in these coordinates only work on one batch shard."""


class RankGroup:
    """The ranks of a backend. Joins the process group if there is more than one rank.

    Roles that share processes share this process group, which ends with the role that made it.
    """

    def __init__(self, rank: WorkerRank, grid: Grid, *, alone: bool = False, hint: Callable[[], str] = str) -> None:
        """`alone`: a single rank has a process group, too. `hint`: what is added where ranks cannot meet."""
        self.rank, self.size, self.role = rank.rank, rank.size, rank.role
        self.device, self._grid = torch.device(rank.device), grid
        self._hint = hint
        self._joined = False
        self._groups: dict[tuple[str, ...], Any] = {}
        """The process groups of this rank, by the coordinates in which their members differ."""
        if self.size > 1 or alone:
            import torch.distributed as dist

            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                self._join(rank)
                self._joined = True
            elif dist.get_world_size() != self.size:
                others = f"the other role in these processes has {dist.get_world_size()} ranks"
                raise ConfigError(f"cluster.ranks.{rank.role}: is {self.size}, but {others}; roles that train or are "
                                  "scored in shared processes have equally many")  # fmt: skip
            self.make_group(*SHARING)

    def _join(self, rank: WorkerRank) -> None:
        import torch.distributed as dist

        kind = "nccl" if self.device.type == "cuda" else "gloo"
        if self.size == 1:
            store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
            dist.init_process_group(kind, store=store, rank=0, world_size=1)
            return
        try:
            dist.init_process_group(
                kind, init_method=rank.rendezvous, rank=self.rank, world_size=self.size,
                timeout=_PATIENCE if kind == "nccl" else None,
            )  # fmt: skip
        except RuntimeError as error:
            raise WhetError(
                f"it cannot meet the other ranks at {rank.rendezvous} ({kind}): {error}{self._hint()}"
            ) from error

    def make_group(self, *axes: str) -> None:
        """Make the groups of ranks that differ in these coordinates only, if any do. All ranks must take part."""
        every = dict.fromkeys(tuple(members(self._grid, rank, *axes)) for rank in range(self.size))
        if len(next(iter(every))) > 1:
            self._groups[axes] = self.once(f"groups {list(every)}", partial(_new_groups, list(map(list, every))))

    def group(self, *axes: str) -> Any:
        """Return the process group of the ranks that differ in these coordinates only. None: there is one such rank."""
        return self._groups.get(axes)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returned for this name in this process, for any role. All ranks must take part."""
        from torch.distributed import group

        made = _MADE.setdefault(group.WORLD, {})
        if name not in made:
            made[name] = make()
        found: T = made[name]
        return found

    @property
    def coordinates(self) -> RankCoordinates:
        """Return the coordinates of this rank."""
        return self._grid.coordinates(self.rank)

    @property
    def owns_shard(self) -> bool:
        """Return whether the driver sends this rank its batch shard, and reads its results."""
        return self.coordinates == RankCoordinates(self.coordinates.data)

    def share(self, value: Any) -> Any:
        """Return the value of the rank that owns the batch shard, on all ranks that work on the shard."""
        group = self.group(*SHARING)
        if group is None:
            return value
        import torch.distributed as dist

        source = members(self._grid, self.rank, *SHARING)[0]
        buffers = [memoryview(buffer).cast("B") for buffer in encode(value)] if self.owns_shard else []
        sizes = self._broadcast(np.array([len(buffers)]), 1, source, group)
        sizes = self._broadcast(np.array([len(buffer) for buffer in buffers]), int(sizes[0]), source, group)
        ends = np.cumsum(sizes)
        pieces = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        sent = np.concatenate([np.zeros(0, np.uint8), *pieces])
        mine = torch.from_numpy(sent) if self.owns_shard else torch.empty(int(ends[-1]), dtype=torch.uint8)
        room = mine.to(self.device)
        dist.broadcast(room, source, group=group)
        if self.owns_shard:
            return value
        received: Any = room.cpu().numpy()
        data = memoryview(received)
        return decode([data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)])

    def _broadcast(self, numbers: Any, count: int, source: int, group: Any) -> Any:
        import torch.distributed as dist

        room = torch.from_numpy(numbers) if self.owns_shard else torch.zeros(count, dtype=torch.int64)
        room = room.to(self.device)
        dist.broadcast(room, source, group=group)
        return room.cpu().numpy()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the batch shards, in float64. Ranks that share a shard count once."""
        return self.sum_all([float(number) if self.owns_shard else 0.0 for number in numbers])

    def sum_all(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks, in float64."""
        return self._reduce(numbers, "SUM")

    def max(self, number: int) -> int:
        """Return the largest number over all ranks."""
        return int(self._reduce([float(number)], "MAX")[0])

    def _reduce(self, numbers: Sequence[float], operation: str) -> list[float]:
        if self.size == 1:
            return [float(number) for number in numbers]
        import torch.distributed as dist

        vector = torch.tensor([float(n) for n in numbers], dtype=torch.float64, device=self.device)
        dist.all_reduce(vector, getattr(dist.ReduceOp, operation))
        result: list[float] = vector.tolist()
        return result

    def leave(self) -> None:
        """Leave the process group, if this object joined it."""
        if self._joined:
            import torch.distributed as dist

            _MADE.pop(dist.group.WORLD, None)
            dist.destroy_process_group()
            self._joined = False


def _new_groups(members: list[list[int]]) -> Any:
    import torch.distributed as dist

    enumerate_groups: Any = dist.new_subgroups_by_enumeration  # torch has no types for it
    return enumerate_groups(members)[0]


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its queued work."""
    import time

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Watch:
    """Adds up the seconds of each phase."""

    def __init__(self, device: torch.device, role: str) -> None:
        """Start the stopwatch. `role` is part of the metric names, e.g. `seconds/critic.forward`."""
        self._device, self._role = device, role
        self._last = clock(device)
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = clock(self._device)
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, Metric]:
        """Return the seconds of each phase as metrics."""
        return {f"seconds/{self._role}.{phase}": metrics.total(seconds) for phase, seconds in self._seconds.items()}
