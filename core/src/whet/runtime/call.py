"""What a worker process is asked, and what is known of it: the words that a `Connection` has in common with others."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from attrs import define, field, frozen

from whet.errors import WorkerError, WorkerLost


@define(eq=False)
class Call:
    """Something asked of a worker, until it is answered."""

    role: str
    rank: int
    phase: str
    timeout_seconds: float
    """For the answer, or for each item of a stream."""
    done: Callable[[Any, WorkerError | None], None]
    """Called once; by threads that serve all calls, so it may not wait, and nor may `part`."""
    part: Callable[[Any], None] = lambda item: None
    """Called with each item of a stream."""
    missed: Callable[[WorkerError], None] = lambda error: None
    """Called when the deadline has passed."""
    expires: float = field(init=False)
    began: float = field(factory=time.monotonic, init=False)

    def __attrs_post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Let the deadline begin anew."""
        self.expires = time.monotonic() + self.timeout_seconds

    def error(self, cause: str, words: str = "", details: str = "") -> WorkerError:
        """Say that this call failed."""
        return WorkerError(self.role, self.rank, self.phase, cause, words, details)

    def lost(self, cause: str, words: str = "", kind: type[WorkerLost] = WorkerLost) -> WorkerLost:
        """Say that the process that this call was made of is lost."""
        return kind(self.role, self.rank, self.phase, cause, words)


@frozen
class UnderWay:
    """What a worker process was asked and has not answered yet."""

    role: str
    rank: int
    phase: str
    seconds: float
    """Since it was asked, or since the oldest of several such calls was."""
    doing: str
    """What its compute thread does, by its own last word; empty: nothing."""
    doing_seconds: float
    silence_seconds: float
    """Since it was last heard of."""

    def __str__(self) -> str:
        said = f"computes {self.doing} since {self.doing_seconds:.0f} s" if self.doing else "computes nothing"
        heard = f"{said}, heard of {self.silence_seconds:.0f} s ago"
        return f"{self.role}-{self.rank} {self.phase} since {self.seconds:.0f} s (its process {heard})"


class HostProcess(Protocol):
    """A process that runs `whet.runtime.worker_process`, however it is started. What it writes ends in its log."""

    @property
    def pid(self) -> int:
        """On its machine; 0 before it is started."""
        ...

    @property
    def node(self) -> str:
        """Name the machine that it is on, once it has been heard of."""
        ...

    def start(self) -> socket.socket:
        """Start it and give the driver's end of the socket to it. Raises `OSError` or `WhetError` saying why not.

        `start` and `wait` are called by one thread, which lives as long as the process may. Both raise `ClusterGone`
        where no other process could be started in its place.
        """
        ...

    def wait(self) -> str:
        """Wait for its end and for that of all it started; say how it ended, in words."""
        ...

    def kill(self) -> None:
        """End it, from any thread, and without waiting; where it is not started yet, as soon as it is."""
        ...

    def state(self) -> str:
        """Give the kernel's letter for what it does, e.g. `T`: stopped. Empty where that is not known."""
        ...

    def show_stacks(self) -> None:
        """Let it write what its threads do to its log, as far as it still can."""
        ...


@frozen
class Terms:
    """What the calls of a cluster have in common."""

    numbers: Iterator[int]
    """Of the messages; none is given twice."""
    deadline: Callable[[str], float]
    """Seconds that a phase may take."""
    grace_seconds: float
    """How long closing waits before it kills."""
