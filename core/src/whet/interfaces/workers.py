"""A slice is a share of the cluster for one role; `spawn` puts worker objects on it.

Driver-side handles of backends and generators see only what is here; launchers implement it
(`whet.runtime.inline` in this process, `whet.runtime.local` as worker processes, later Ray).
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from attrs import field, frozen

from whet.data.batch import Shards

if TYPE_CHECKING:
    from pathlib import Path

    from whet.data.metrics import Metric
    from whet.data.model_info import ModelInfo
    from whet.errors import WorkerError, WorkerLost
    from whet.interfaces.logger import RunInfo
    from whet.interfaces.weights import Proof, TransferSpec


def _with_shards(instance: object, attribute: Any, columns: tuple[Any, ...]) -> None:
    """Refuse what does not say for how many ranks it is."""
    sizes = {len(column) for column in columns if isinstance(column, Shards)}
    if len(sizes) != 1:
        raise ValueError(f"found shards for {sorted(sizes)} ranks, wanted those of one or more batches for one number")


@frozen(eq=False)
class RankArguments(Sequence[tuple[Any, ...]]):
    """What each rank is called with: of `Shards` its own batch, of anything else the same.

    It stands for a list of tuples; each batch is cut out when it is asked for.
    """

    columns: tuple[Any, ...] = field(validator=_with_shards)

    def __len__(self) -> int:
        return next(len(column) for column in self.columns if isinstance(column, Shards))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*(c if isinstance(c, Shards) else repeat(c, len(self)) for c in self.columns), strict=True)

    @overload
    def __getitem__(self, rank: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> "RankArguments": ...

    def __getitem__(self, rank: int | slice) -> "tuple[Any, ...] | RankArguments":
        chosen = tuple(column[rank] if isinstance(column, Shards) else column for column in self.columns)
        return RankArguments(chosen) if isinstance(rank, slice) else chosen


class Pending(Protocol):
    """A call under way."""

    def result(self) -> Any:
        """Wait for the result; raises `WorkerError` on failure, death or a missed deadline."""
        ...

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...


class PendingEach(Protocol):
    """A call under way on several ranks, each of which stands or falls by itself."""

    def result(self, rank: int) -> Any:
        """Wait for that of a rank; raises `WorkerError` on failure, death or a missed deadline."""
        ...

    def wait(self) -> None:
        """Wait until all have answered, or one has not."""
        ...

    def when(self, rank: int, call: "Callable[[WorkerError | None], None]") -> bool:
        """Call this once a rank has answered, or with why it has not; False: that was before, or it was not asked.

        It may be called by any thread, and may not wait.
        """
        ...

    def done(self) -> bool:
        """Whether `result` would return at once for every rank."""
        ...


class Heard(NamedTuple):
    """What came of one of several streams."""

    rank: int
    items: Sequence[Any] = ()
    over: bool = False
    """Whether it was the last of that stream."""
    error: Exception | None = None
    """Why the stream failed, where it did; usually a `WorkerError`."""


class Workers(Protocol):
    """The worker objects of one role, one for each rank.

    A worker class is named by import path. It is built as `Class(rank=WorkerRank, **arguments)` and its public
    methods are called by name. Arguments and results are builtins, core records and NumPy arrays: they cross
    as records and buffers. Sync methods of one worker run one at a time, in order, on one thread; coroutine
    methods and methods that are async generators run beside them, on one event loop. A worker class with a
    `close()` has it called at the end.

    What single ranks are asked (`start_on`, streams) may overtake a call of all ranks or of each of several, or be
    overtaken by it, where nobody waits for the one before the other.

    `phase` names the kind of wait, for errors and for the deadline where `timeout_seconds` is None: a field of
    `DeadlinesSection` (`start`, `train`, `generate`, `weight_sync`, `save`); empty: the method's name. A stream's
    deadline is for each of its items.
    """

    size: int

    @property
    def alone(self) -> bool:
        """Whether no other role lives in their processes, so that one can be restarted by itself."""
        ...

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call on every rank with the same arguments and wait; results in rank order."""
        ...

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> "Pending":
        """Start a call on every rank; its result is the list in rank order."""
        ...

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> "Pending":
        """Start a call on one rank; its result is a list of one. A missed deadline ends that rank alone."""
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
        """Call rank i with arguments[i] and wait; results in rank order."""
        ...

    def scatter_metrics(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> "dict[str, Metric]":
        """Call rank i with arguments[i], wait, and merge the metrics that all give."""
        ...

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        """Call an async-generator method of one rank, in the process that the rank has now; yields what it yields.

        It is called with the first item that is asked for. Closing the iterator cancels it.
        """
        ...

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncIterator[Heard]:
        """Call an async-generator method of several ranks as `stream` does, each with a list of its own.

        Yields what they yield, as it comes; each rank stands or falls by itself. It ends when all are over.
        """
        ...

    def restart(self, rank: int) -> None:
        """End the process of one rank, start another, and build the worker anew with the same arguments.

        Calls of that rank that are under way fail. Only where the workers are `alone` and need not meet each other.
        """
        ...

    def close(self) -> None:
        """End the workers: ask, then kill, with everything that they started. Safe to call twice."""
        ...


@frozen
class WorkerRank:
    """What a worker knows of its place; given as the keyword argument `rank`."""

    role: str
    rank: int
    size: int
    rendezvous: str = ""
    """URL for `torch.distributed.init_process_group` where size > 1, e.g. `tcp://127.0.0.1:PORT` or `file://...`."""
    threads: int = 1
    """Threads for compute."""
    device: str = "cpu"
    """`cpu` or `cuda:INDEX`."""


class Slice(Protocol):
    """A share of the cluster for one role."""

    @property
    def role(self) -> str:
        """The role's name."""
        ...

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    @property
    def host_groups(self) -> tuple[str, ...]:
        """For each rank, a name of its process: equal names of two roles share a process, and so can share tensors."""
        ...

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> Workers:
        """Start one worker object for each rank and wait until all are built."""
        ...


class Give(Protocol):
    """Lets a replica that was lost have weights again."""

    def __call__(self, link: "TransferSpec | None", proof: "Proof | None" = None) -> None:
        """Let it take those of the link; None: it has them already. Then it has to pass the proof, if there is one."""
        ...


class Replacing(Protocol):
    """Lets a generator replace a replica that was lost."""

    losses: Counter[str]
    """How many replicas were lost while they had a request, by its id; outlives the generator."""

    def grant(self, error: "WorkerLost") -> bool:
        """Say whether a replica may be restarted after this, which is noted and told to the user."""
        ...

    def hand_over(self, give: Give) -> None:
        """Call `give` once with what a replica needs to have the current weights.

        Waits until they can be given; meanwhile no other hand-over begins.
        """
        ...


@frozen
class Site:
    """What a backend or generator gets beside its config."""

    slice: Slice
    model: "ModelInfo"
    run: "RunInfo"
    seed: int
    """The run's seed; derive from it."""
    scratch: "Path"
    """A folder of this run for files that need not last."""
    status: Callable[[str], None] = lambda text: None
    """Say what is going on, e.g. "rollouts, 91 of 128 episodes finished"."""
    max_context: int = 0
    """Longest sequence that will be asked for; 0: the model's own limit."""
    trained: bool = True
    """Whether the model is trained here; if not, no optimizer is needed."""
    replacing: Replacing | None = None
    """For generators; None: a replica that is lost is not replaced."""
