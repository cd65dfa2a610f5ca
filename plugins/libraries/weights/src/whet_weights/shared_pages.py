"""Anonymous files in memory (memfd) that other processes of the node open by name, and the node that they are on.

    memory-PROCESS-DESCRIPTOR     the name: such a file is /proc/PROCESS/fd/DESCRIPTOR

The kernel frees the memory when the last process that has it open or mapped is gone, however that process ended.
"""

import os
import re
from pathlib import Path
from typing import Final

from whet.errors import WhetError
from whet.plan.machine import available_memory

NODE: Final = "WHET_NODE"
"""Environment variable: Ray's id of the node of a worker process. Not set where all processes are on one machine."""
_TITLE: Final = "whet-tensors"
_NAME: Final = re.compile(r"memory-(\d{1,10})-(\d{1,10})")


def this_node() -> str:
    """Return the node of this process. Empty: all processes of the run are on one machine."""
    return os.environ.get(NODE, "")


def create() -> int:
    """Return the descriptor of a new anonymous file. Raises `OSError`."""
    return os.memfd_create(_TITLE)


def name_of(descriptor: int) -> str:
    """Return the name of a file of this process."""
    return f"memory-{os.getpid()}-{descriptor}"


def find(name: str) -> Path | None:
    """Return the path of a file. None: the name is not the name of an anonymous file.

    Raises `FileNotFoundError` if no process of this node has it open any more.
    """
    found = _NAME.fullmatch(name)
    if not found:
        return None
    file = Path(f"/proc/{found[1]}/fd/{found[2]}")
    if not os.readlink(file).startswith(f"/memfd:{_TITLE}"):  # another process has the number by now
        raise FileNotFoundError(file)
    return file


def reserve(descriptor: int, size: int) -> None:
    """Make a file `size` bytes long. Raises `OSError`, or `WhetError` where they do not fit into memory.

    The pages are reserved: writing to a mapped page that cannot be had kills the process.
    """
    more, free = size - os.fstat(descriptor).st_size, available_memory()
    if more > free:
        raise WhetError(f"weights of {size / 1e6:.0f} MB do not fit into memory: {free / 1e6:.0f} MB are available")
    os.posix_fallocate(descriptor, 0, size)
