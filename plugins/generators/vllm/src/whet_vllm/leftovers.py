"""Shared memory that vLLM's processes make among themselves, and leave behind when they are killed.

Linux only. On other systems nothing is found and nothing is removed.
"""

import contextlib
import os
import re
from pathlib import Path

_ITS_OWN = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+")


def note(file: Path) -> None:
    """Write to a file which shared memory the descendants of this process have mapped."""
    found: set[str] = set()
    for process in _below(os.getpid()):
        with contextlib.suppress(OSError):
            found.update(_ITS_OWN.findall(Path(f"/proc/{process}/maps").read_text(encoding="utf-8")))
    file.write_text("\n".join(sorted(found)), encoding="utf-8")


def sweep(file: Path) -> None:
    """Remove the shared memory that `note` listed, if the engine has left it behind, and then the list."""
    with contextlib.suppress(FileNotFoundError):
        for name in file.read_text(encoding="utf-8").splitlines():
            Path(name).unlink(missing_ok=True)
        file.unlink()


def _below(ancestor: int) -> set[int]:
    """Return the ids of all descendants of a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a process may end during the scan
            parents[int(stat.parent.name)] = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    found = {ancestor}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {ancestor}
