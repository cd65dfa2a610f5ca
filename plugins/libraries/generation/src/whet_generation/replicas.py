"""The common part of generators made of independent replicas, whatever their engine: requests, weights, replacement."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.data.records import Completion, Request
from whet.errors import WhetError, WorkerLost
from whet.interfaces.weights import Proof, TransferSpec
from whet.interfaces.workers import Pending, PendingEach, Replacing, Workers
from whet.runtime.threads import run_coroutine
from whet_generation.dispatcher import RequestDispatcher
from whet_generation.replica_set import ReplicaSet

if TYPE_CHECKING:
    from whet.interfaces.generator import OnWeightUpdate
    from whet.interfaces.workers import RoleContext


class Replicas:
    """One replica of the model for each rank. Workers have the methods that `whet_generation.dispatcher` lists, and
    `receive_weights(spec, version, on_weight_update)`.
    """

    def __init__(self, workers: Workers, replacing: Replacing | None) -> None:
        """Take the workers. `replacing` decides whether a lost replica is replaced; None: its loss fails the
        generator.
        """
        self.workers = workers
        self._replica_set = ReplicaSet(workers, replacing, self._receive, self._rest)
        self._dispatcher = RequestDispatcher(workers, self._replica_set)
        self._replica_set.changed = self._dispatcher.wake

    async def generate(self, request: Request) -> Completion:
        """Return the completion of a request; see `RequestDispatcher.generate`. Raises `WhetError` while the replicas
        sleep.
        """
        if self._replica_set.asleep:
            raise WhetError(f"request {request.id} comes while the generator sleeps; wake it first")
        return await self._dispatcher.generate(request)

    def receive_weights(
        self, spec: TransferSpec, version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> "ReplicaCalls":
        """Start to receive new weights on every present replica. The others get them when they come back.

        A replica serves requests made from now on when it has the weights.
        """
        seconds = spec.timeout_seconds + spec.drain_seconds
        taking = self._started(
            "receive_weights", spec, spec.version, on_weight_update, phase="weight_sync", seconds=seconds
        )
        self._dispatcher.hold(taking.pending, taking.lives)
        return taking

    def present(self) -> tuple[int, int]:
        """Return how many replicas are present, and how many there are if none is lost."""
        return len(self._replica_set.present()), self.workers.size

    def sleep(self) -> int | None:
        """Put every present replica to sleep. Return the bytes released; None: unknown. Replicas that come back sleep
        too.
        """
        self._replica_set.rest(True)
        given = [count for count in self._started("sleep").answers() if count is not None]
        return sum(given) if given else None

    def wake(self) -> None:
        """Wake every present replica. Replicas that were lost meanwhile are replaced from now on."""
        self._replica_set.rest(False)
        self._started("wake").answers()

    def close(self) -> None:
        """End the workers."""
        self._replica_set.close()
        self.workers.close()

    def _started(self, method: str, *args: Any, phase: str = "", seconds: float | None = None) -> "ReplicaCalls":
        """Start a call on every present replica."""
        with self._replica_set.asking(range(self.workers.size)) as lives:
            pending = self.workers.start_each(lives, method, *args, phase=phase, timeout_seconds=seconds)
        return ReplicaCalls(self._replica_set, lives, pending)

    def _rest(self, rank: int, asleep: bool) -> None:
        self.workers.start_on(rank, "sleep" if asleep else "wake").result()

    def _receive(self, rank: int, spec: TransferSpec, proof: Proof | None) -> None:
        ask = partial(self.workers.start_on, phase="weight_sync", timeout_seconds=spec.timeout_seconds)
        ask(rank, "receive_weights", spec, spec.version, "drain").result()
        if proof is not None:
            proof.check(rank, run_coroutine(self._answers(rank, proof.requests(rank))))

    async def _answers(self, rank: int, requests: Sequence[Request]) -> list[Completion]:
        """Return one replica's completions of requests that no one else sees, in their order."""
        found: dict[str, Completion] = {}
        async for outcomes in self.workers.stream(rank, "generate", list(requests), phase="generate"):
            for outcome in outcomes:
                if not isinstance(outcome, Completion):
                    raise WhetError(outcome[1])
                found[outcome.id] = outcome
        return [found[request.id] for request in requests]


class ReplicatedGenerator:
    """The driver's part of a generator of replicas; see `whet.interfaces.generator.Generator`.

    Workers also have `sleep()`, which returns the bytes that it released, or None, and `wake()`; see the interface.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], context: "RoleContext") -> None:
        self._replicas = Replicas(context.worker_group.spawn(target, arguments), context.replacing)

    async def generate(self, request: Request) -> Completion:
        """Continue one sequence. Raises `WhetError` for a prompt that leaves no room."""
        return await self._replicas.generate(request)

    def receive_weights(
        self, spec: TransferSpec, version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> Pending:
        """Start to receive new weights of one transfer. Requests made from now on wait for them.

        `on_weight_update` decides about running requests. `drain`: they finish with the old weights. `continue`: they
        stop between two tokens and continue with the new weights. `abort`: they end with the tokens that they have
        and `stop="abort"`.
        """
        return self._replicas.receive_weights(spec, version, on_weight_update)

    def present(self) -> tuple[int, int]:
        """Return how many replicas are present, and how many there are if none is lost."""
        return self._replicas.present()

    def sleep(self) -> int | None:
        """Release memory, weights and cache, if the engine can. Return the bytes; None: the engine does not report
        them.
        """
        return self._replicas.sleep()

    def wake(self) -> None:
        """Take the memory again."""
        self._replicas.wake()

    def close(self) -> None:
        """End the workers and their engines."""
        self._replicas.close()


@frozen
class ReplicaCalls:
    """Calls to several replicas, e.g. to receive weights. A replica that is lost meanwhile is replaced, and gets them
    then.
    """

    replicas: ReplicaSet
    lives: Mapping[int, int]
    """The life of each rank that was called."""
    pending: PendingEach

    def result(self) -> None:
        """Wait for all replicas. Raises `WorkerError`."""
        self.answers()

    def answers(self) -> list[Any]:
        """Wait for all replicas, and return the results of the replicas that were not lost. Raises `WorkerError`."""
        found: list[Any] = []
        self.pending.wait()
        for rank, life in self.lives.items():
            try:
                found.append(self.pending.result(rank))
            except WorkerLost as error:
                if not self.replicas.lost(rank, life, error):
                    raise (self.replicas.failure or error) from error
        return found

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return self.pending.done()
