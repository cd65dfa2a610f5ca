"""Saves in the background: a copy in host memory is written by a thread, while the worker trains.

driver     save_in_background ──> taken ─────────────> other calls ────────────> result
worker       take: copy of weights, buffers, moments   train, sleep, ...         written
thread                                 └── write the copy ──────────> durable ───┘
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from whet.interfaces.workers import Pending, Workers
from whet.plan.machine import available_memory

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Iterable[tuple[str, "Tensor"]]
SPARE = 1.25
"""A copy is made where this times its size is free in host memory."""


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
        self._workers.call("written", phase="save")


class Writer:
    """Writes on a thread of a worker process, one save at a time."""

    def __init__(self) -> None:
        self._writing: Future[None] | None = None

    def take(self, tensors: Tensors, size: int, write: Callable[[Tensors], None]) -> None:
        """Copy tensors of `size` bytes to host memory, and have a thread call `write` with the copies.

        Where the memory does not suffice for copies, `write` is called before this returns.
        """
        if self._writing is not None:
            self._writing.exception()  # the write before: its copies take the memory
        self._writing = None
        if SPARE * size > available_memory():
            print(f"saving {size / 2**30:.1f} GiB in the foreground: no host memory for a copy", flush=True)
            write(tensors)
        else:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
            self._start(lambda: write(copies.items()))

    def _start(self, work: Callable[[], None]) -> None:
        writing = self._writing = Future[None]()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # is raised by `written`
                writing.set_exception(error)
            else:
                writing.set_result(None)

        threading.Thread(target=run, name="whet-fsdp2-save", daemon=True).start()

    async def written(self) -> None:
        """Wait until the files are durable, and raise what prevented it."""
        if self._writing is not None:
            await asyncio.wrap_future(self._writing)
