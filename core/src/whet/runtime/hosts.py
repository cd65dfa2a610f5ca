"""What a launcher provides: processes that host workers, and a line to each of them.

`whet.runtime.local` has the launcher for this machine. Launchers for clusters of several machines are plugins.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from whet.data.spans import Span
from whet.moved import leading_on
from whet.runtime.traffic import Traffic
from whet.runtime.wire import Buffer

if TYPE_CHECKING:
    from whet.interfaces.weights import Copy


@frozen
class Host:
    """A process to start: its name, and what the roles that live in it need."""

    name: str
    """`ROLE-RANK` of the role that names its group."""
    roles: tuple[str, ...]
    """The roles that share the process."""
    threads: int
    """Number of compute threads: the largest of its roles."""
    gpus: tuple[str, ...]
    """Indices of the GPUs, which all its roles use; empty: it uses no GPU. Other processes may have the same GPUs."""
    python: str = ""
    """Path of the interpreter of all its roles; empty: the driver's interpreter, or its launcher's."""


class MessageLine(Protocol):
    """Both directions between the driver and one process. Messages that are sent before it is open wait."""

    over: threading.Event
    """Set when everything that the process sent has been taken, or when the line is closed."""

    def open(self, end: Any, /) -> None:
        """Start to send and receive, with what `HostProcess.start` returned."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Do not change its buffers before its answer has come."""

    def close(self) -> None:
        """Close the line, and drop messages that still wait."""


class HostProcess(Protocol):
    """A process that runs `whet.runtime.worker_process`, however it is started. Its output goes to its log."""

    @property
    def pid(self) -> int:
        """Return the process id on its machine; 0 before the start."""

    def line(
        self, traffic: Traffic, take: Callable[[list[memoryview]], Any], broken: Callable[[str], None],
        heard: Callable[[], None],
    ) -> MessageLine:  # fmt: skip
        """Return the line to the process, which is not open yet; see `whet.runtime.channel.Line`."""

    def start(self) -> Any:
        """Start the process and return what its line opens. Raises `OSError` or `WhetError` with the reason.

        One thread calls `start` and `wait`. It lives as long as the process may. Both methods raise `ClusterGone`
        when no other process could be started in place of this one.
        """

    def wait(self) -> str:
        """Wait until the process and all that it started have ended. Return how the process ended, in words."""

    def kill(self) -> None:
        """Kill the process without waiting. Any thread may call this. Before the start, the kill follows the start."""

    def state(self) -> str:
        """Return the kernel's letter for the state of the process, e.g. `T`: stopped. Empty: unknown."""

    def show_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log, if it still can."""


class Launcher(Protocol):
    """Starts the processes of a cluster."""

    def process(self, host: Host, group: Sequence[Host], log: Path) -> HostProcess:
        """Return a process that is not started yet.

        `group` has all processes of its roles and of those that share GPUs with them, this one included. The output of
        the process must go to `log`.
        """

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Import modules once for all the processes that may be forked afterwards; see `WorkerFacts.forkable`.

        A process that cannot be forked within `patience_seconds` is started in the normal way. A launcher that does not
        fork does nothing here.
        """

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Return the part of the first message to a process that holds the folders from which it imports.

        `path` replaces its `sys.path`; `add` is added to it.
        """

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Return a new URL at which the ranks of one spawn meet. Rank 0 lives in the first of `processes`."""

    def address(self) -> str:
        """Return the address at which processes reach this machine. Servers on this machine listen there."""

    def preparations(self) -> list[Span]:
        """Return spans for the work in the background that processes had to wait for, as far as it is done."""

    def copy_memory(
        self, memory: str, size: int, node: str, hosts: Sequence[Host], have: Collection[str], seconds: float
    ) -> "Mapping[str, Copy]":
        """Copy a memory of a process on `node` to every other node of these processes, but those that `have` it.

        Return the copies by node. `seconds`: the limit for the whole. A launcher for one machine does nothing.
        """

    def close(self) -> None:
        """Release everything that was reserved, after all processes have ended."""


__getattr__ = leading_on(__name__, {"Call": "whet.runtime.connection"})
