"""A rank of a backend with tensor-parallel groups, for `test_axes.py`."""

from typing import Any

import numpy as np

from whet.data.batch import Batch
from whet.data.metrics import Metric, total
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.workers import WorkerRank
from whet.runtime.wire import decode, encode


class SharingWorker:
    """Shares the shard that one rank of a group gets from the driver with the other ranks of the group."""

    def __init__(self, rank: WorkerRank, tensor: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.size)
        data, place = divmod(rank.rank, tensor)
        self._place, self._owner = RankCoordinates(data, place), data * tensor
        members = [range(first, first + tensor) for first in range(0, rank.size, tensor)]
        self._group = [dist.new_group(list(ranks)) for ranks in members][data]
        self.got = 0

    def coordinates(self) -> RankCoordinates:
        return self._place

    def train(self, batch: Batch | None, loss: str) -> dict[str, Metric]:
        """Return counts of the shard, from every rank."""
        self.got += batch is not None
        shard = self._share(batch)
        return {"tokens": total(float(shard.tokens)), "sum": total(float(shard["tokens"].sum()))}

    def score(self, batch: Batch | None, word: str) -> Any:
        return word, self._share(batch)["tokens"]

    def received(self) -> int:
        """Return the number of shards that this rank got from the driver."""
        return self.got

    def _share(self, batch: Batch | None) -> Batch:
        buffers = [] if batch is None else [np.frombuffer(buffer, np.uint8) for buffer in encode(batch)]
        count = self._broadcast(np.array([len(buffers)]))[0]
        sizes = self._broadcast(np.array([buffer.nbytes for buffer in buffers] or [0] * count))
        rows = buffers or [np.empty(size, np.uint8) for size in sizes]
        shared: Batch = decode([self._broadcast(row).data for row in rows])
        return shared

    def _broadcast(self, array: Any) -> Any:
        import torch
        import torch.distributed as dist

        room = torch.from_numpy(array.copy())
        dist.broadcast(room, self._owner, self._group)
        return room.numpy()

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
