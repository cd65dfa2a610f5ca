"""The contract of workers. A `WorkerGroup` is one role's share of the cluster, and `spawn` starts workers there.

Backends and generators use nothing else of the runtime. Launchers implement this contract: `whet.runtime.inline` in
the driver's process, `whet.runtime.local` with worker processes, and plugins on clusters of several machines.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from pathlib import Path

    from whet.component import AdapterInfo
    from whet.data.model_info import ModelInfo
    from whet.errors import WorkerError, WorkerLost
    from whet.interfaces.logger import RunInfo
    from whet.interfaces.weights import Proof, TransferSpec


class Pending(Protocol):
    """A running call."""

    def result(self) -> Any:
        """Wait for the result and return it. Raise `WorkerError` if the worker fails, dies or misses its deadline."""

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""


class PendingEach(Protocol):
    """A running call on several ranks. Each rank succeeds or fails by itself."""

    def result(self, rank: int) -> Any:
        """Wait for the result of a rank and return it. Raise `WorkerError` if it fails, dies or misses its deadline."""

    def wait(self) -> None:
        """Wait until every rank has answered, or one rank has failed."""

    def when(self, rank: int, call: "Callable[[WorkerError | None], None]") -> bool:
        """Run `call` once, when the rank has answered or failed. Any thread may run `call`, and `call` must not wait.

        The argument of `call` is None if the rank has answered, or the rank's error if it has failed. Return False if
        `call` will not be run, because the rank has answered or failed already, or was not called.
        """

    def done(self) -> bool:
        """Return whether every rank has its result, so that `result` does not wait for any rank."""


class Heard(NamedTuple):
    """New items of one of several streams, or the end of this stream."""

    rank: int
    items: Sequence[Any] = ()
    over: bool = False
    """Whether the stream has ended."""
    error: Exception | None = None
    """The error with which the stream failed, usually a `WorkerError`. None: it has not failed."""


class Workers(Protocol):
    """The worker objects of one role, one for each rank.

    A worker class is named by its import path. A worker is built as `Class(rank=WorkerRank, **arguments)`, and its
    public methods are called by name. Arguments and results are builtins, core records and NumPy arrays. They cross
    processes as records and buffers.

    The sync methods of one worker run one at a time, in order, on one thread. Coroutine methods and async-generator
    methods run at the same time, on one event loop. If a worker class has a method `close()`, it is called at the end.

    Calls on single ranks (`start_on`, streams) and calls on several ranks may overtake each other. To keep their order,
    wait for the first call before the second.

    `phase` names what the caller waits for. The phase appears in errors. If `timeout_seconds` is None, the phase also
    chooses the deadline: a field of `DeadlinesSection` (`start`, `train`, `generate`, `weight_sync`, `save`). Empty:
    the phase is the method's name. The deadline of a stream applies to each item of the stream.
    """

    size: int

    @property
    def alone(self) -> bool:
        """Return whether no other role has workers in these processes, so that one can be restarted alone."""

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call every rank with the same arguments, wait, and return the results in rank order."""

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> "Pending":
        """Start a call on every rank. The result of the call is the list of results in rank order."""

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> "Pending":
        """Start a call on one rank. Its result is a list with one item. A missed deadline ends only this rank."""

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> "PendingEach":
        """Start a call on each of these ranks. A rank that misses its deadline is ended; the other ranks go on."""

    def scatter(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call rank i with arguments[i], wait, and return the results in rank order."""

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        """Call an async-generator method of one rank and yield its items.

        The call goes to the process that the rank has now, when the first item is requested. Closing the iterator
        cancels the call.
        """

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncIterator[Heard]:
        """Call an async-generator method of several ranks, and yield the items of all streams as they arrive.

        Each rank is called as in `stream`, with its own argument list from `shares`. Each rank succeeds or fails by
        itself. The iterator ends when all streams have ended.
        """

    def restart(self, rank: int) -> None:
        """End the process of one rank, start a new process, and build the worker again with the same arguments.

        Running calls of the rank fail. A restart is possible only if the workers are `alone` and use no collectives
        among themselves.
        """

    def close(self) -> None:
        """End the workers and every process that they started: ask first, then kill. A second call does nothing."""


@frozen
class WorkerRank:
    """A worker's place in the run. Each worker receives it as the keyword argument `rank`."""

    role: str
    rank: int
    size: int
    rendezvous: str = ""
    """URL for `torch.distributed.init_process_group` if size > 1, e.g. `tcp://127.0.0.1:PORT` or `file://...`."""
    threads: int = 1
    """Number of threads for computation."""
    device: str = "cpu"
    """`cpu`, `cuda:INDEX`, or `cuda:0,1` for a rank that has several GPUs."""


class WorkerGroup(Protocol):
    """One role's share of the cluster. The workers of the role are started there."""

    @property
    def role(self) -> str:
        """Return the role's name."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def host_groups(self) -> tuple[str, ...]:
        """Return the name of the process of each rank. Roles with equal names share a process and can share tensors."""

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> Workers:
        """Start one worker object for each rank, wait until all are built, and return them."""


class Give(Protocol):
    """A function that sends weights to a restarted replica."""

    def __call__(self, spec: "TransferSpec | None", proof: "Proof | None" = None) -> None:
        """Send the weights of the transfer to the replica. Then check the proof, if there is one.

        None as `spec`: the replica already has the weights.
        """


class Replacing(Protocol):
    """The permission for a generator to replace lost replicas, and the way to send them weights."""

    losses: Counter[str]
    """By request id: the number of replicas that were lost while they ran it. The counts outlive the generator."""

    def grant(self, error: "WorkerLost") -> bool:
        """Return whether a replica may be restarted after this error. Record the decision, and show it to the user."""

    def sync(self, give: Give) -> None:
        """Wait until the weights can be sent. Then call `give` once, with the spec and proof of the current weights.

        No other weight sync begins in the meantime.
        """


@frozen
class RoleContext:
    """Everything that a backend or generator receives in addition to its config."""

    worker_group: WorkerGroup
    """Starts the workers of this role."""
    model: "ModelInfo"
    run: "RunInfo"
    seed: int
    """The run's seed. Derive other seeds from it."""
    scratch: "Path"
    """A folder of this run for temporary files."""
    status: Callable[[str], None] = lambda text: None
    """Shows the user the current activity, e.g. "rollouts, 91 of 128 episodes finished"."""
    max_context: int = 0
    """Length of the longest sequence that will be requested, in tokens. 0: the model's own limit."""
    trained: bool = True
    """Whether this role trains the model. If not, the model needs no optimizer."""
    optimizer_steps: int = 0
    """Optimizer steps that this role takes in the whole run, e.g. for a schedule. 0: one in each step of the run."""
    replacing: Replacing | None = None
    """Only for generators. None: lost replicas are not replaced."""
    columns: frozenset[str] = frozenset()
    """Only for generators. The columns that completions must have; see `whet.interfaces.generator`."""
    adapter: "AdapterInfo | None" = None
    """Only for generators: the adapter that weight syncs bring in the place of all weights. None: they bring none."""
    transport: str = ""
    """Only for generators: the transport of weight syncs. Empty: there are none, e.g. because nothing is trained."""
