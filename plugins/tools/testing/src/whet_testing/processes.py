"""Which processes descend from this one: what a test must not leave behind. Linux; elsewhere nothing is seen."""

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
    """A process; two with one id but another start are not the same."""

    pid: int
    started: int
    """In clock ticks since boot."""
    command: str = field(eq=False, order=False)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of processes whose own parent has died, so that they stay in sight."""
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
    """Find the living processes that descend from this one."""
    parents: dict[int, int] = {}
    processes: dict[int, Process] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
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
    """Find descendants that were not there before, waiting for them to end while patience lasts.

    Python's own resource tracker lives as long as this process and does not count.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        left = frozenset(p for p in descendants() - before if "multiprocessing.resource_tracker" not in p.command)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def end(processes: frozenset[Process]) -> None:
    """Kill what is left, so that it does not disturb the next test."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
