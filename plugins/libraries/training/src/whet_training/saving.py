"""Saves in the background: a copy in host memory is written by a thread, while the worker trains.

driver     save_in_background ──> taken ─────────────> other calls ────────────> result
worker       take: copy of weights, buffers, moments   train, sleep, ...         written
thread                                 └── write the copy ──────────> durable ───┘

A worker has the methods `take(folder)` and `written()`. If `written` returns anything, the driver calls `complete` of
all workers with the list of what they returned: what describes the files of all ranks can be written then.
"""

import asyncio
import socket
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.interfaces.workers import Pending, Workers
from whet.plan.machine import available_memory

if TYPE_CHECKING:
    from torch import Tensor

    from whet_training.ranks import RankGroup

Tensors = Iterable[tuple[str, "Tensor"]]
SPARE = 1.25
"""Copies are made where this times the size of all copies on a host is free in its memory."""


class BackgroundSave:
    """A save of all ranks, on the driver. Implements `whet.interfaces.backend.PendingSave`."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        """Start the copy on every rank."""
        self._workers = workers
        self._taking: Pending = workers.start("take", str(folder), phase="save")

    def taken(self) -> None:
        """Wait until every rank has its copy."""
        self._taking.result()

    def result(self) -> None:
        """Wait until the files are durable."""
        self._taking.result()
        written = self._workers.call("written", phase="save")
        if any(one is not None for one in written):
            self._workers.call("complete", written, phase="save")


class Writer:
    """Writes on a thread of a worker process, one save at a time."""

    def __init__(self, ranks: "RankGroup") -> None:
        self._ranks = ranks
        self._writing: Future[Any] | None = None

    def take(self, tensors: Tensors, size: int, write: Callable[[Tensors], Any]) -> None:
        """Copy tensors of `size` bytes to host memory, and have a thread call `write` with the copies.

        Where the memory of a host does not suffice for the copies of its ranks, every rank calls `write` before this
        returns. All ranks must take part.
        """
        if self._writing is not None:
            self._writing.exception()  # the write before: its copies take the memory
        self._writing = None
        if not self._fits(size):
            print(f"saving {size / 2**30:.1f} GiB in the foreground: no host memory for a copy", flush=True)
            self._writing = Future()
            self._writing.set_result(write(tensors))
        else:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
            self._start(lambda: write(copies.items()))

    def _fits(self, size: int) -> bool:
        """Return whether the copies of all ranks fit into the memory of their hosts."""
        ranks, host = self._ranks, float(zlib.crc32(socket.gethostname().encode()))
        mine = (host, float(size))
        every = ranks.sum_all([number if rank == ranks.rank else 0 for rank in range(ranks.size) for number in mine])
        needed = SPARE * sum(size for name, size in zip(every[::2], every[1::2], strict=True) if name == host)
        return not ranks.max(int(needed > available_memory()))

    def _start(self, work: Callable[[], Any]) -> None:
        writing = self._writing = Future[Any]()

        def run() -> None:
            try:
                found = work()
            except BaseException as error:  # is raised by `written`
                writing.set_exception(error)
            else:
                writing.set_result(found)

        threading.Thread(target=run, name="whet-backend-save", daemon=True).start()

    async def written(self) -> Any:
        """Wait until the files are durable, and raise what prevented it. Return what `write` returned."""
        return None if self._writing is None else await asyncio.wrap_future(self._writing)
