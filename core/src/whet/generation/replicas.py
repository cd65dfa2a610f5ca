"""What a generator of independent replicas has in common, whatever its engine: requests, weights, and replacement."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.data.records import Completion, Request
from whet.errors import WhetError, WorkerLost
from whet.generation.dispatcher import RequestDispatcher
from whet.generation.replica_set import ReplicaSet
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import Pending, PendingEach, Replacing, Workers
from whet.weights.probe import Proof

if TYPE_CHECKING:
    from whet.interfaces.generator import OnWeightUpdate
    from whet.interfaces.workers import Site


class Replicas:
    """One replica of the model for each rank. Workers have what `whet.generation.dispatcher` says, and
    `receive_weights(link, version, on_weight_update)`.
    """

    def __init__(self, workers: Workers, replacing: Replacing | None) -> None:
        """Of these workers; `replacing` says what becomes of one that is lost, None: the generator has failed."""
        self.workers = workers
        self._replica_set = ReplicaSet(workers, replacing, self._receive, self._rest)
        self._dispatcher = RequestDispatcher(workers, self._replica_set)
        self._replica_set.changed = self._dispatcher.wake

    async def generate(self, request: Request) -> Completion:
        """Have one request served; see `RequestDispatcher.generate`. Raises `WhetError` while they sleep."""
        if self._replica_set.asleep:
            raise WhetError(f"request {request.id} comes while the generator sleeps; wake it first")
        return await self._dispatcher.generate(request)

    def receive_weights(
        self, link: TransferSpec, version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> "ReplicaCalls":
        """Start to take new weights on every replica that is there; the others get them when they come back.

        Each serves what is asked from now on when it has them.
        """
        seconds = link.timeout_seconds
        taking = self._started(
            "receive_weights", link, link.version, on_weight_update, phase="weight_sync", seconds=seconds
        )
        self._dispatcher.hold(taking.pending, taking.lives)
        return taking

    def sleep(self) -> int | None:
        """Put every replica to sleep that is there; those that come back meanwhile sleep as well."""
        self._replica_set.rest(True)
        given = [count for count in self._started("sleep").answers() if count is not None]
        return sum(given) if given else None

    def wake(self) -> None:
        """Wake every replica that is there; those that were lost meanwhile are replaced from now on."""
        self._replica_set.rest(False)
        self._started("wake").answers()

    def close(self) -> None:
        """End the workers."""
        self._replica_set.close()
        self.workers.close()

    def _started(self, method: str, *args: Any, phase: str = "", seconds: float | None = None) -> "ReplicaCalls":
        """Start a call on every replica that is there."""
        with self._replica_set.asking(range(self.workers.size)) as lives:
            pending = self.workers.start_each(lives, method, *args, phase=phase, timeout_seconds=seconds)
        return ReplicaCalls(self._replica_set, lives, pending)

    def _rest(self, rank: int, asleep: bool) -> None:
        self.workers.start_on(rank, "sleep" if asleep else "wake").result()

    def _receive(self, rank: int, link: TransferSpec, proof: Proof | None) -> None:
        ask = partial(self.workers.start_on, phase="weight_sync", timeout_seconds=link.timeout_seconds)
        ask(rank, "receive_weights", link, link.version, "drain").result()
        if proof is not None:
            proof.check(rank, asyncio.run(self._answers(rank, proof.requests(rank))))

    async def _answers(self, rank: int, requests: Sequence[Request]) -> list[Completion]:
        """Have one replica serve requests that nobody else sees; in their order."""
        found: dict[str, Completion] = {}
        async for outcomes in self.workers.stream(rank, "generate", list(requests), phase="generate"):
            for outcome in outcomes:
                if not isinstance(outcome, Completion):
                    raise WhetError(outcome[1])
                found[outcome.id] = outcome
        return [found[request.id] for request in requests]


class ReplicatedGenerator:
    """What a generator of replicas does on the driver; see `whet.interfaces.generator.Generator`.

    Workers also have `sleep()`, which gives the bytes that it gave back, or None, and `wake()`; see the interface.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], site: "Site") -> None:
        self._replicas = Replicas(site.slice.spawn(target, arguments), site.replacing)

    async def generate(self, request: Request) -> Completion:
        """Continue one sequence. Raises `WhetError` for a prompt that leaves no room."""
        return await self._replicas.generate(request)

    def receive_weights(
        self, link: TransferSpec, version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> Pending:
        """Start to take new weights over a link. Requests that come from now on wait for them.

        `drain` lets those that run end with the old ones; `continue` stops them between two tokens, and they go on with
        the new ones; `abort` ends them with what they have and `stop="abort"`.
        """
        return self._replicas.receive_weights(link, version, on_weight_update)

    def sleep(self) -> int | None:
        """Give memory back, weights and cache, where the engine can; how many bytes, None where it does not tell."""
        return self._replicas.sleep()

    def wake(self) -> None:
        """Take it again."""
        self._replicas.wake()

    def close(self) -> None:
        """End the workers, and the engines with them."""
        self._replicas.close()


@frozen
class ReplicaCalls:
    """Calls of replicas, as of weights on their way: those that are lost meanwhile are replaced, and get them then."""

    replicas: ReplicaSet
    lives: Mapping[int, int]
    """Of each rank that was asked."""
    pending: PendingEach

    def result(self) -> None:
        """Wait for all; raises `WorkerError`."""
        self.answers()

    def answers(self) -> list[Any]:
        """Wait for all, and give what those say that are not lost. Raises `WorkerError`."""
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
        """Whether `result` would return at once."""
        return self.pending.done()
