"""Shared memory that vLLM's processes make among themselves, and leave behind where they are killed.

Linux alone; elsewhere none is seen, and none removed.
"""

import contextlib
import os
import re
from pathlib import Path

_ITS_OWN = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+")


def note(file: Path) -> None:
    """Write down which shared memory the processes below this one have."""
    found: set[str] = set()
    for process in _below(os.getpid()):
        with contextlib.suppress(OSError):
            found.update(_ITS_OWN.findall(Path(f"/proc/{process}/maps").read_text(encoding="utf-8")))
    file.write_text("\n".join(sorted(found)), encoding="utf-8")


def sweep(file: Path) -> None:
    """Remove what an engine that has ended had written down, where it did not do so itself."""
    with contextlib.suppress(FileNotFoundError):
        for name in file.read_text(encoding="utf-8").splitlines():
            Path(name).unlink(missing_ok=True)
        file.unlink()


def _below(ancestor: int) -> set[int]:
    """Find the processes that descend from one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end while it is looked at
            parents[int(stat.parent.name)] = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    found = {ancestor}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {ancestor}
