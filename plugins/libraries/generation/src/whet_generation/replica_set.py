"""Which replicas of a generator are present. A lost replica is replaced by a new process with the current weights.

present ── dies or hangs ──> away: its requests go to others, or wait ── restarted, has weights ──> present
                               └── no restarts left, the restart raises, or the whole cluster is lost:
                                   the generator has failed
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from attrs import define, field

from whet.errors import ClusterLost, WorkerError, WorkerLost, in_words
from whet.interfaces.weights import Proof, TransferSpec
from whet.interfaces.workers import Replacing, Workers

Rest = Callable[[int, bool], None]
"""(rank, asleep): put the worker of that rank to sleep, or wake it."""
Receive = Callable[[int, TransferSpec, Proof | None], None]
"""(rank, spec, proof): have the worker of that rank receive weights, wait for it, and check the proof."""


@define(eq=False)
class ReplicaSet:
    """The replicas of a generator. Any thread may use it."""

    workers: Workers
    replacing: Replacing | None = None
    """None: a lost replica fails the generator."""
    receive: Receive = lambda rank, spec, proof: None
    put: Rest = lambda rank, asleep: None
    changed: Callable[[], None] = lambda: None
    """Called when a replica has come back, or the generator has failed."""
    losses: Counter[str] = field(init=False)
    """How many replicas were lost while they ran a request, by request id."""
    failure: WorkerError | None = field(default=None, init=False)
    """Why no request can be served any more. None: requests can be served."""
    asleep: bool = field(default=False, init=False)
    """Whether the present replicas sleep. A replica that is lost meanwhile is restarted when they wake."""
    _away: set[int] = field(factory=set, init=False)
    _present: frozenset[int] = field(init=False)
    _lives: list[int] = field(init=False)
    _closed: bool = field(default=False, init=False)
    _asked: list[int] = field(init=False)
    """Number of calls that are being made to each replica."""
    _lock: threading.Condition = field(factory=threading.Condition, init=False)

    def __attrs_post_init__(self) -> None:
        self._present = frozenset(range(self.workers.size))
        self._lives, self._asked = [0] * self.workers.size, [0] * self.workers.size
        self.losses = Counter() if self.replacing is None else self.replacing.losses

    def present(self) -> frozenset[int]:
        """Return the ranks that can be called. It is the same object until that changes."""
        return self._present

    @contextmanager
    def asking(self, ranks: Iterable[int]) -> Iterator[dict[int, int]]:
        """Keep replicas on their present processes while calls to them are started.

        Yields the life of each replica that is present, for `lost`: a loss reported for an earlier life is ignored.
        """
        with self._lock:
            lives = {rank: self._lives[rank] for rank in ranks if rank in self._present}
            for rank in lives:
                self._asked[rank] += 1
        try:
            yield lives
        finally:
            with self._lock:
                for rank in lives:
                    self._asked[rank] -= 1
                if self._away:
                    self._lock.notify_all()

    def lost(self, rank: int, life: int, error: WorkerLost) -> bool:
        """Record the loss of a replica, and return whether it will come back. If not, `failure` has the reason."""
        with self._lock:
            if self._closed or self.failure is not None:
                return False
            if rank in self._away or life != self._lives[rank]:
                return True
            if self.replacing is None or not self.workers.alone:
                return False  # where another role lives in its process, only all of them can begin again
            if isinstance(error, ClusterLost):
                self.failure = error
                return False
            if not self.replacing.grant(error):
                self.failure = _exhausted(error)
                return False
            self._away.add(rank)
            self._present -= {rank}
        threading.Thread(target=self._replace, args=(rank,), name=f"whet-replace-{rank}", daemon=True).start()
        return True

    def rest(self, asleep: bool) -> None:
        """Record that all replicas are about to sleep or to wake."""
        with self._lock:
            self.asleep = asleep
            self._lock.notify_all()

    def close(self) -> None:
        """Stop replacing replicas."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _replace(self, rank: int) -> None:
        assert self.replacing is not None
        with self._lock:
            # While the others sleep, the memory that a new process would take is somebody else's.
            if self._lock.wait_for(lambda: self._closed or not (self._asked[rank] or self.asleep)) and self._closed:
                return
        while True:
            try:
                self.workers.restart(rank)
                self.replacing.sync(lambda spec, proof=None: self._arrive(rank, spec, proof))
            except ClusterLost as error:
                self._fail(error)
            except WorkerLost as error:
                if self._closed:
                    return
                if self.replacing.grant(error):
                    continue
                self._fail(_exhausted(error))
            except WorkerError as error:
                self._fail(error)
            except Exception as error:  # this thread's edge: the callers must get the error
                self._fail(WorkerError("generator", rank, "start", in_words(error)))
            return

    def _arrive(self, rank: int, spec: TransferSpec | None, proof: Proof | None) -> None:
        """Receive the weights and become present, before another weight sync can begin without this replica."""
        if spec is not None:
            self.receive(rank, spec, proof)
        sleeps = False
        while not self._comes_back(rank, sleeps):
            sleeps = not sleeps
            self.put(rank, sleeps)
        self.changed()

    def _comes_back(self, rank: int, asleep: bool) -> bool:
        """Mark a replica as present if it sleeps or is awake as the others are. Return whether it did."""
        with self._lock:
            if self.asleep != asleep:
                return False
            self._away.discard(rank)
            self._present |= {rank}
            self._lives[rank] += 1
            return True

    def _fail(self, error: WorkerError) -> None:
        with self._lock:
            if self._closed:
                return
            self.failure = self.failure or error
        self.changed()


def _exhausted(error: WorkerLost) -> WorkerError:
    cause = f"{error.cause}; replicas were restarted as often as cluster.recovery.replicas allows"
    return WorkerError(error.role, error.rank, error.phase, cause, error.last_words)
