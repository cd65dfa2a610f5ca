"""Calls to worker processes and the processes themselves: the types that `Connection` shares with its neighbours."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from whet.errors import WorkerError, WorkerLost
from whet.runtime.traffic import Traffic
from whet.runtime.wire import Buffer


@define(eq=False)
class Call:
    """A request to a worker, until it is answered."""

    role: str
    rank: int
    phase: str
    timeout_seconds: float
    """Limit for the answer, or for each item of a stream."""
    done: Callable[[Any, WorkerError | None], None]
    """Called once, with the result or the error.

    The threads that serve all calls call `done` and `part`, so neither may wait.
    """
    part: Callable[[Any], None] = lambda item: None
    """Called with each item of a stream."""
    missed: Callable[[WorkerError], None] = lambda error: None
    """Called when the deadline has passed."""
    expires: float = field(init=False)
    began: float = field(factory=time.monotonic, init=False)

    def __attrs_post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Start the deadline again."""
        self.expires = time.monotonic() + self.timeout_seconds

    def error(self, cause: str, words: str = "", details: str = "") -> WorkerError:
        """Return the error for the failure of this call."""
        return WorkerError(self.role, self.rank, self.phase, cause, words, details)

    def lost(self, cause: str, words: str = "", kind: type[WorkerLost] = WorkerLost) -> WorkerLost:
        """Return the error for the loss of this call's process."""
        return kind(self.role, self.rank, self.phase, cause, words)


@frozen
class InFlightCall:
    """A call that a worker process has not answered yet."""

    role: str
    rank: int
    phase: str
    seconds: float
    """Seconds since the call began. For several calls of one phase: since the oldest began."""
    doing: str
    """What the compute thread of the process does, as the process last reported; empty: nothing."""
    doing_seconds: float
    """Seconds since the compute thread began to do this."""
    silence_seconds: float
    """Seconds since the driver last received anything from the process."""

    def __str__(self) -> str:
        said = f"computes {self.doing} since {self.doing_seconds:.0f} s" if self.doing else "computes nothing"
        heard = f"{said}, heard of {self.silence_seconds:.0f} s ago"
        return f"{self.role}-{self.rank} {self.phase} since {self.seconds:.0f} s (its process {heard})"


class MessageLine(Protocol):
    """Both directions between the driver and one process. Messages that are sent before it is open wait."""

    over: threading.Event
    """Set when everything that the process sent has been taken, or when the line is closed."""

    def open(self, end: Any, /) -> None:
        """Start to send and receive, with what `HostProcess.start` returned."""
        ...

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Do not change its buffers before its answer has come."""
        ...

    def close(self) -> None:
        """Close the line, and drop messages that still wait."""
        ...


class HostProcess(Protocol):
    """A process that runs `whet.runtime.worker_process`, however it is started. Its output goes to its log."""

    @property
    def pid(self) -> int:
        """Return the process id on its machine; 0 before the start."""
        ...

    @property
    def node(self) -> str:
        """Return the name of its machine, once that is known."""
        ...

    def line(
        self,
        traffic: Traffic,
        take: Callable[[list[memoryview]], Any],
        broken: Callable[[str], None],
        heard: Callable[[], None],
    ) -> MessageLine:
        """Return the line to the process, which is not open yet; see `whet.runtime.traffic.Line`."""
        ...

    def start(self) -> Any:
        """Start the process and return what its line opens. Raises `OSError` or `WhetError` with the reason.

        One thread calls `start` and `wait`. It lives as long as the process may. Both methods raise `ClusterGone`
        when no other process could be started in place of this one.
        """
        ...

    def wait(self) -> str:
        """Wait until the process and all that it started have ended. Return how the process ended, in words."""
        ...

    def kill(self) -> None:
        """Kill the process without waiting. Any thread may call this. Before the start, the kill follows the start."""
        ...

    def state(self) -> str:
        """Return the kernel's letter for the state of the process, e.g. `T`: stopped. Empty: unknown."""
        ...

    def show_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log, if it still can."""
        ...


@frozen
class RpcSettings:
    """What all calls of a cluster have in common."""

    numbers: Iterator[int]
    """Numbers for the messages, each used once."""
    deadline: Callable[[str], float]
    """Returns the seconds that a phase may take."""
    grace_seconds: float
    """How long closing waits before it kills the processes."""
