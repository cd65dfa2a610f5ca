"""Find the descendants of this process. A test must leave none behind. On Linux only: elsewhere none are found."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import field, frozen

PR_SET_CHILD_SUBREAPER = 36


@frozen(order=True)
class Process:
    """A process. Two processes with one id and different start times are different."""

    pid: int
    started: int
    """Start time, in clock ticks since boot."""
    command: str = field(eq=False, order=False)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent has died, so that `descendants` finds them."""
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants() -> frozenset[Process]:
    """Return the living processes that descend from this process."""
    parents: dict[int, int] = {}
    processes: dict[int, Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end between the reads of its files.
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if state not in "ZX":
                parents[pid], processes[pid] = int(parent), Process(pid, int(rest[17]), command[:400])
    return frozenset(process for pid, process in processes.items() if _descends(pid, parents))


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def survivors(before: frozenset[Process], patience_seconds: float = 0.0) -> frozenset[Process]:
    """Return the descendants that are not in `before`. Wait up to `patience_seconds` for them to end.

    Python's resource tracker is left out, because it lives as long as this process.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        left = frozenset(p for p in descendants() - before if "multiprocessing.resource_tracker" not in p.command)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def end(processes: frozenset[Process]) -> None:
    """Kill processes, so that they do not disturb the next test."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
