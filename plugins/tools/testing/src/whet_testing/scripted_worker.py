"""A worker class that fails, hangs or dies on command. The rules of launchers are tested with it."""

import asyncio
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from whet.interfaces.workers import WorkerRank
from whet.runtime.worker_process import compute_thread

TARGET = "whet_testing.scripted_worker:ObedientWorker"


class ObedientWorker:
    """A worker for tests. Each method does one thing that a test may want from a worker."""

    def __init__(
        self, rank: WorkerRank, offset: int = 0, fail: bool = False, hang: bool = False, trace: str = ""
    ) -> None:
        if hang:
            time.sleep(1000.0)
        if fail:
            raise ValueError(f"rank {rank.rank} was told not to start")
        self.rank, self.offset, self.trace = rank, offset, trace
        self.seen: list[Any] = []
        self.cancelled = 0
        self.streams, self.naps = 0, 0

    def place(self) -> WorkerRank:
        """Return the rank of this worker."""
        return self.rank

    def add(self, value: Any) -> Any:
        """Return the value plus `offset`."""
        return value + self.offset

    def echo(self, *values: Any) -> Any:
        """Return the arguments."""
        return list(values)

    def remember(self, value: Any) -> int:
        """Append a value to `seen`, and return the id of this thread.

        The method sleeps in between, so that an assertion fails when two calls run at one time.
        """
        before = len(self.seen)
        time.sleep(0.002)
        assert len(self.seen) == before, "two sync methods ran at one time"
        self.seen.append(value)
        return threading.get_ident()

    def state(self) -> dict[str, Any]:
        """Return the values seen, the number of cancelled streams, open streams and naps, and the process id."""
        return {
            "seen": self.seen,
            "cancelled": self.cancelled,
            "streams": self.streams,
            "naps": self.naps,
            "pid": os.getpid(),
        }

    def environment(self) -> dict[str, str]:
        """Return the environment variables of this process."""
        return dict(os.environ)

    def imported(self, module: str) -> tuple[str, str]:
        """Import a module. Return the file of the module and the path of this interpreter."""
        return str(importlib.import_module(module).__file__), sys.executable

    def fail(self, ranks: tuple[int, ...] = (0,), message: str = "as told") -> int:
        """Raise on the ranks in `ranks`. Return the rank on all others."""
        if self.rank.rank in ranks:
            raise ValueError(message)
        return self.rank.rank

    def fail_or_hang(self, rank: int) -> None:
        """Raise on one rank while the other ranks hang, as ranks do in a collective."""
        if self.rank.rank == rank:
            raise ValueError("as told")
        time.sleep(1000.0)

    def fail_or_die(self, rank: int) -> None:
        """Raise on one rank. End the process on all other ranks a moment later."""
        if self.rank.rank == rank:
            raise ConnectionError("the other end is gone")
        time.sleep(0.2)
        os._exit(3)

    def unsendable(self) -> object:
        """Return a value that cannot be sent to another process."""
        return {"inside": object()}

    def hang(self, seconds: float = 1000.0) -> None:
        """Sleep in a sync method."""
        time.sleep(seconds)

    def die(self, how: int, words: str = "") -> None:
        """Write `words` to stderr, then end by the signal `how`. A negative `how` is an exit code with a minus sign."""
        print(words, file=sys.stderr)
        if how < 0:
            os._exit(-how)
        if how == signal.SIGSEGV:
            ctypes.string_at(0)
        os.kill(os.getpid(), how)
        time.sleep(1000.0)

    def start_child(self, own_session: bool = False) -> int:
        """Start a process that sleeps for 1000 seconds, and return its id."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=own_session).pid

    async def later(self, value: Any, seconds: float = 0.01) -> Any:
        """Return a value after some seconds. Sync methods can run in the meantime."""
        await asyncio.sleep(seconds)
        return value

    async def compute(self, value: Any) -> AsyncIterator[Any]:
        """Yield the result of `add`, which runs on the compute thread."""
        yield await asyncio.wrap_future(compute_thread().submit(self.add, value))

    async def count(self, numbers: int, fail_at: int = -1, seconds: float = 0.0) -> AsyncIterator[Any]:
        """Yield (rank, number), and count the stream in `cancelled` when it does not reach its end."""
        self.streams += 1
        done = False
        try:
            for number in range(numbers):
                if number == fail_at:
                    raise ValueError("as told")
                await asyncio.sleep(seconds)
                yield self.rank.rank, number
            done = True
        finally:
            self.streams -= 1
            self.cancelled += not done

    async def nap(self, seconds: list[float]) -> AsyncIterator[Any]:
        """Sleep for each number of seconds, and yield (rank, seconds) after each sleep."""
        self.naps += 1
        done = False
        try:
            for each in seconds:
                await asyncio.sleep(each)
                yield self.rank.rank, each
            done = True
        finally:
            self.cancelled += not done

    async def hang_in_stream(self) -> AsyncIterator[Any]:
        """Yield once, then block the event loop."""
        yield 0
        await asyncio.sleep(0)
        time.sleep(1000.0)

    def close(self) -> None:
        """Write an empty file `closed-ROLE-RANK` into the folder `trace`, if one is set."""
        if self.trace:
            Path(self.trace, f"closed-{self.rank.role}-{self.rank.rank}").touch()
