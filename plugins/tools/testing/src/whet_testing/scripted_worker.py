"""A worker class that does as it is told: fails, hangs, dies. Launchers are tested with it."""

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
    """Its methods are what can be asked of it."""

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
        """Give what it knows of its place."""
        return self.rank

    def add(self, value: Any) -> Any:
        """Add what it was built with."""
        return value + self.offset

    def echo(self, *values: Any) -> Any:
        """Give back what came."""
        return list(values)

    def remember(self, value: Any) -> int:
        """Append to what it has seen, slowly, so that two at once would be found out; give the thread."""
        before = len(self.seen)
        time.sleep(0.002)
        assert len(self.seen) == before, "two sync methods ran at one time"
        self.seen.append(value)
        return threading.get_ident()

    def state(self) -> dict[str, Any]:
        """Say what happened so far."""
        return {
            "seen": self.seen,
            "cancelled": self.cancelled,
            "streams": self.streams,
            "naps": self.naps,
            "pid": os.getpid(),
        }

    def environment(self) -> dict[str, str]:
        """Give its environment variables."""
        return dict(os.environ)

    def imported(self, module: str) -> tuple[str, str]:
        """Import a module; give its file and this interpreter."""
        return str(importlib.import_module(module).__file__), sys.executable

    def fail(self, ranks: tuple[int, ...] = (0,), message: str = "as told") -> int:
        """Raise on some ranks."""
        if self.rank.rank in ranks:
            raise ValueError(message)
        return self.rank.rank

    def fail_or_hang(self, rank: int) -> None:
        """Raise on one rank while the others wait for it, as they do in a collective."""
        if self.rank.rank == rank:
            raise ValueError("as told")
        time.sleep(1000.0)

    def fail_or_die(self, rank: int) -> None:
        """Raise on one rank, and a moment later die on all others."""
        if self.rank.rank == rank:
            raise ConnectionError("the other end is gone")
        time.sleep(0.2)
        os._exit(3)

    def unsendable(self) -> object:
        """Give something that cannot cross."""
        return {"inside": object()}

    def hang(self, seconds: float = 1000.0) -> None:
        """Sleep."""
        time.sleep(seconds)

    def die(self, how: int, words: str = "") -> None:
        """End by a signal, or exit with a code where `how` is negative; the last words go to stderr."""
        print(words, file=sys.stderr)
        if how < 0:
            os._exit(-how)
        if how == signal.SIGSEGV:
            ctypes.string_at(0)
        os.kill(os.getpid(), how)
        time.sleep(1000.0)

    def start_child(self, own_session: bool = False) -> int:
        """Start a process that does nothing for long; give its id."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=own_session).pid

    async def later(self, value: Any, seconds: float = 0.01) -> Any:
        """Give a value after a while, beside the sync methods."""
        await asyncio.sleep(seconds)
        return value

    async def compute(self, value: Any) -> AsyncIterator[Any]:
        """Do work on the compute thread from a stream."""
        yield await asyncio.wrap_future(compute_thread().submit(self.add, value))

    async def count(self, numbers: int, fail_at: int = -1, seconds: float = 0.0) -> AsyncIterator[Any]:
        """Yield (rank, number); note when it is cancelled or closed early."""
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
        """Yield (rank, seconds) after each of so many."""
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
        """Yield once, then block the whole event loop."""
        yield 0
        await asyncio.sleep(0)
        time.sleep(1000.0)

    def close(self) -> None:
        """Leave a trace."""
        if self.trace:
            Path(self.trace, f"closed-{self.rank.role}-{self.rank.rank}").touch()
