"""A `WorkerGroup` is the place of one role in the cluster. `spawn` starts worker objects there.

Driver-side handles of backends and generators see only what is here. Launchers implement it: `whet.runtime.inline` in
this process, `whet.runtime.local` as worker processes, and plugins on clusters of several machines.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from whet.data.model_info import ModelInfo
    from whet.errors import WorkerError, WorkerLost
    from whet.interfaces.logger import RunInfo
    from whet.interfaces.weights import Proof, TransferSpec


class Pending(Protocol):
    """A running call."""

    def result(self) -> Any:
        """Wait for the result and return it. Raises `WorkerError` on failure, death or a missed deadline."""
        ...

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        ...


class PendingEach(Protocol):
    """A running call on several ranks. Each rank succeeds or fails by itself."""

    def result(self, rank: int) -> Any:
        """Wait for one rank's result and return it. Raises `WorkerError` on failure, death or a missed deadline."""
        ...

    def wait(self) -> None:
        """Wait until every rank has answered, or one has failed."""
        ...

    def when(self, rank: int, call: "Callable[[WorkerError | None], None]") -> bool:
        """Run `call` once when the rank has answered (with None) or failed (with its error). Any thread may run it.

        `call` must not wait. Return False where it will not be run, because the rank has answered already or was not
        called.
        """
        ...

    def done(self) -> bool:
        """Return whether `result` would return at once for every rank."""
        ...


class Heard(NamedTuple):
    """Items or the end of one of several streams."""

    rank: int
    items: Sequence[Any] = ()
    over: bool = False
    """Whether this was the last of that stream."""
    error: Exception | None = None
    """Why the stream failed, if it did; usually a `WorkerError`."""


class Workers(Protocol):
    """The worker objects of one role, one for each rank.

    A worker class is named by import path. It is built as `Class(rank=WorkerRank, **arguments)` and its public methods
    are called by name. Arguments and results are builtins, core records and NumPy arrays: they cross processes as
    records and buffers. Sync methods of one worker run one at a time, in order, on one thread. Coroutine methods and
    async-generator methods run beside them, on one event loop. A worker class with a `close()` has it called at the
    end.

    Calls on single ranks (`start_on`, streams) and calls on several ranks may overtake each other, unless the caller
    waits for the first before it makes the second.

    `phase` names the kind of wait. It appears in errors, and where `timeout_seconds` is None it chooses the deadline: a
    field of `DeadlinesSection` (`start`, `train`, `generate`, `weight_sync`, `save`). Empty: the method's name. The
    deadline of a stream applies to each of its items.
    """

    size: int

    @property
    def alone(self) -> bool:
        """Return whether no other role lives in these processes, so that one process can be restarted by itself."""
        ...

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call every rank with the same arguments, wait, and return the results in rank order."""
        ...

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> "Pending":
        """Start a call on every rank. Its result is the list of results in rank order."""
        ...

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> "Pending":
        """Start a call on one rank. Its result is a list of one. A missed deadline ends that rank alone."""
        ...

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> "PendingEach":
        """Start a call on each of these ranks. A missed deadline ends that rank alone."""
        ...

    def scatter(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call rank i with arguments[i], wait, and return the results in rank order."""
        ...

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        """Call an async-generator method of one rank and yield its items.

        The call goes to the process that the rank has now, when the first item is requested. Closing the iterator
        cancels it.
        """
        ...

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncIterator[Heard]:
        """Call an async-generator method of several ranks, as `stream` does. Each rank gets its own list from `shares`.

        Yields the items as they arrive. Each rank succeeds or fails by itself. Ends when all streams have ended.
        """
        ...

    def restart(self, rank: int) -> None:
        """End the process of one rank, start another, and build the worker again with the same arguments.

        Running calls of that rank fail. Possible only where the workers are `alone` and have no collective among them.
        """
        ...

    def close(self) -> None:
        """End the workers with every process that they started: ask first, then kill. Safe to call twice."""
        ...


@frozen
class WorkerRank:
    """What a worker knows about its place in the run; passed as the keyword argument `rank`."""

    role: str
    rank: int
    size: int
    rendezvous: str = ""
    """URL for `torch.distributed.init_process_group` where size > 1, e.g. `tcp://127.0.0.1:PORT` or `file://...`."""
    threads: int = 1
    """Number of threads for compute."""
    device: str = "cpu"
    """`cpu` or `cuda:INDEX`."""


class WorkerGroup(Protocol):
    """The place of one role in the cluster. Its workers are started there."""

    @property
    def role(self) -> str:
        """Return the role's name."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def host_groups(self) -> tuple[str, ...]:
        """Return a name for the process of each rank.

        Two roles with an equal name share that process, and so can share tensors.
        """
        ...

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> Workers:
        """Start one worker object for each rank, wait until all are built, and return them."""
        ...


class Give(Protocol):
    """Gives weights to a replica that was restarted."""

    def __call__(self, spec: "TransferSpec | None", proof: "Proof | None" = None) -> None:
        """Send the weights of the transfer to the replica, then check the proof if there is one. None: it already
        has them.
        """
        ...


class Replacing(Protocol):
    """Allows a generator to replace replicas that were lost."""

    losses: Counter[str]
    """How many replicas were lost while they ran a request, by request id. Outlives the generator."""

    def grant(self, error: "WorkerLost") -> bool:
        """Return whether a replica may be restarted after this error. Record the decision and show it to the user."""
        ...

    def sync(self, give: Give) -> None:
        """Call `give` once, with the spec and proof that bring the replica to the current weights.

        Wait until the weights can be sent. No other weight sync begins meanwhile.
        """
        ...


@frozen
class RoleContext:
    """Everything that a backend or generator gets beside its config."""

    slice: WorkerGroup
    model: "ModelInfo"
    run: "RunInfo"
    seed: int
    """The run's seed. Derive other seeds from it."""
    scratch: "Path"
    """A folder of this run for temporary files."""
    status: Callable[[str], None] = lambda text: None
    """Shows what is going on, e.g. "rollouts, 91 of 128 episodes finished"."""
    max_context: int = 0
    """Longest sequence, in tokens, that will be requested; 0: the model's own limit."""
    trained: bool = True
    """Whether the model is trained here. If not, it needs no optimizer."""
    replacing: Replacing | None = None
    """For generators. None: lost replicas are not replaced."""


Slice, Site = WorkerGroup, RoleContext
"""The names of before, for one version."""
