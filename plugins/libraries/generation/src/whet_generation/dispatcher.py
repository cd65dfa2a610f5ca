"""Sends requests to the replicas of a generator. Requests made together travel in one message per replica.

    generate(request) -> outbox -> (no new request in one iteration of the event loop) -> one message per replica
                      <- future <- lists of completions, as each decoded batch ends

The worker has an async generator `generate(requests)` that yields lists of outcomes. An outcome is a `Completion`, or
`(id, message)` for a request that cannot be served. Where a request wants it, `Progress` records may come before its
outcome. The worker's `abort(ids)` ends requests early. While a replica receives new weights, its requests wait in the
dispatcher. They are sent when the replica has confirmed the new weights.

If a replica is lost, each of its requests goes to another replica, or waits for one, with the same id and seed. A
request that was running at two losses is a suspect. Suspects are served one prompt at a time. If a replica is lost
while it serves a suspect, the suspect is given up. Requests that only ran beside it are served again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from attrs import Factory, define, evolve, field

from whet.data.records import Completion, Progress, Request
from whet.errors import RequestLost, WhetError, WorkerError, WorkerLost
from whet.interfaces.generator import Listener, listener
from whet.interfaces.workers import Heard, PendingEach, Workers
from whet.runtime.inline import close_stream
from whet_generation.load_balancer import LoadBalancer
from whet_generation.replica_set import ReplicaSet

PATIENCE = 8
"""The outbox waits at most this many iterations of the event loop for further requests."""
MOST_LOSSES = 3
"""A request that was running on this many lost replicas is assumed to kill them, and is not served again."""


@define(eq=False)
class _Waiting:
    request: Request
    future: "asyncio.Future[Completion]"
    listener: Listener | None = None
    """Receives the tokens while they are sampled."""
    rank: int = -1
    """Rank of the replica that serves the request; -1: the request is not sent yet."""

    @property
    def prompt(self) -> str:
        """Return a name that all samples of one prompt share."""
        return self.request.prefix or self.request.id

    @property
    def load(self) -> int:
        return len(self.request.tokens) + self.request.sampling.max_tokens


class _Batch:
    """Requests that are running on one replica."""

    def __init__(self, rank: int, life: int, waiting: list[_Waiting]) -> None:
        self.rank, self.life = rank, life
        self.requests = [one.request for one in waiting]
        self.open = {one.request.id: one for one in waiting}

    @property
    def unanswered(self) -> WorkerError:
        """Return the error for requests that got no outcome."""
        return WorkerError("generator", self.rank, "generate", "it ended without answering")


@define(eq=False)
class RequestDispatcher:
    """Spreads requests over replicas by their outstanding tokens. Requests with equal prefixes go to one replica.

    For use from one event loop.
    """

    workers: Workers
    replicas: ReplicaSet = field(default=Factory(lambda self: ReplicaSet(self.workers), takes_self=True))
    _outbox: list[_Waiting] = field(factory=list, init=False)
    _flushing: bool = field(default=False, init=False)
    """Whether a flush of the outbox is scheduled."""
    _patience: int = field(default=0, init=False)
    _load_balancer: LoadBalancer = field(init=False)
    _prefixes: dict[str, tuple[int, int]] = field(factory=dict, init=False)
    """By prefix of running requests: their replica, and their number."""
    _tasks: "set[asyncio.Task[None]]" = field(factory=set, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _suspects: list[_Waiting] = field(factory=list, init=False)
    """Suspects that wait until the suspects in `_on_trial` have finished."""
    _on_trial: list[_Waiting] = field(factory=list, init=False)
    """Suspects that are being served: all samples of one prompt."""
    _taking: list[tuple[PendingEach, Mapping[int, int]]] = field(factory=list, init=False)
    """Weight syncs that may still be running, and the life of each replica that takes part."""
    _held: dict[int, list[_Waiting]] = field(factory=dict, init=False)
    """By replica: requests that wait until the replica has received weights."""
    _ready: deque[tuple[int, int, WorkerError | None]] = field(factory=deque, init=False)
    """Replicas whose weight sync has ended, until the event loop handles them: rank, life, error if it failed."""
    _cancelled: dict[int, list[str]] = field(factory=dict, init=False)
    """By replica: requests whose awaiting task was cancelled in this iteration of the loop."""

    def __attrs_post_init__(self) -> None:
        self._load_balancer = LoadBalancer(self.workers.size)

    async def generate(self, request: Request) -> Completion:
        """Return the completion of a request. Cancelling the awaiting task aborts the request at the worker.

        Raises `WhetError` if the request cannot be served. Raises `RequestLost` if replicas were lost repeatedly while
        they ran the request, or if the request names a replica that is away. Raises `WorkerError` if a replica fails
        or no replica is left.
        """
        # These losses are from earlier run attempts, in which a replica shared its process with another role.
        if self.replicas.losses[request.id] >= MOST_LOSSES:
            raise self._given_up(request)
        self._loop = asyncio.get_running_loop()
        if (to := listener.get()) is not None:
            request = evolve(request, progress=to.likeliest)
        waiting = _Waiting(request, self._loop.create_future(), to)
        self._send_soon([waiting])
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.rank >= 0:
                if not self._cancelled:
                    self._loop.call_soon(self._abort_cancelled)
                self._cancelled.setdefault(waiting.rank, []).append(request.id)
            raise

    def wake(self) -> None:
        """Check again which replicas are present. Any thread may call this."""
        self._soon(lambda: self._flush(len(self._outbox)))

    def hold(self, taking: PendingEach, lives: Mapping[int, int]) -> None:
        """Hold new requests for each replica until its call in `taking` ends. `lives` comes from `ReplicaSet.asking`.

        Any thread may call this.
        """
        self._taking = [*(one for one in self._taking if not one[0].done()), (taking, lives)]

    def _soon(self, do: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and no task waits any more
                self._loop.call_soon_threadsafe(do)

    @property
    def outstanding(self) -> list[int]:
        """Return the outstanding tokens of each replica: tokens of prompts plus token limits."""
        return self._load_balancer.each()

    def _send_soon(self, waiting: list[_Waiting]) -> None:
        if not self._flushing:  # requests already in the outbox may be waiting for a replica
            self._flushing, self._patience = True, PATIENCE
            asyncio.get_running_loop().call_soon(self._flush, 0)
        self._outbox += waiting

    def _flush(self, seen: int) -> None:
        if len(self._outbox) != seen and self._patience > 0:
            # More requests may come. Episodes that got their completions together request their next turns within a
            # few iterations of the event loop. Batches should not depend on the number of these iterations.
            self._patience -= 1
            asyncio.get_running_loop().call_soon(self._flush, len(self._outbox))
            return None
        self._flushing = False
        present, failure = self.replicas.present(), self.replicas.failure
        if failure is None:
            self._refuse_absent(present)
        if not present and failure is None:
            return None  # `wake` will flush again
        outbox, self._outbox = [w for w in self._outbox if not w.future.done()], []
        if failure is not None:
            held, self._suspects = self._suspects, []
            return self._fail(outbox + held, failure)
        messages: dict[int, list[_Waiting]] = {}
        for waiting in self._hold_suspects(outbox):
            waiting.rank = self._place(waiting, present)
            messages.setdefault(waiting.rank, []).append(waiting)
        return self._send(messages)

    def _send(self, messages: dict[int, list[_Waiting]]) -> None:
        """Send requests to their replicas, or hold them until their replica has received weights."""
        for rank in list(messages):
            if rank in self._held:
                self._held[rank] += messages.pop(rank)
                self._soon(self._release)  # an event loop that was closed may have held them
            elif any(taking.when(rank, partial(self._has_taken, rank, lives)) for taking, lives in self._taking):
                self._held[rank] = messages.pop(rank)
        if messages:
            self._spawn(self._serve(messages))

    def _has_taken(self, rank: int, lives: Mapping[int, int], error: WorkerError | None) -> None:
        self._ready.append((rank, lives[rank], error))
        self._soon(self._release)

    def _release(self) -> None:
        """Send the held requests of each replica that now has its weights. Several replicas may be ready at once.

        If a replica was lost instead, other replicas serve its requests. These requests are not suspects, because they
        never reached the lost replica.
        """
        messages: dict[int, list[_Waiting]] = {}
        while self._ready:
            rank, life, error = self._ready.popleft()
            if rank in self._held and (held := self._no_longer_held(rank)):
                if isinstance(error, WorkerLost):
                    self._serve_elsewhere(rank, life, held, error)
                else:
                    messages[rank] = held
        self._send(messages)

    def _no_longer_held(self, rank: int) -> list[_Waiting]:
        """Return the held requests of a replica that have not been cancelled meanwhile."""
        held = self._held.pop(rank)
        for waiting in held:
            if waiting.future.done():
                self._leave(waiting)
        return [waiting for waiting in held if waiting.rank >= 0]

    def _refuse_absent(self, there: frozenset[int]) -> None:
        """Refuse requests for a replica that is away.

        No other replica may serve these requests, and they must not wait for the replica.
        """
        absent = [w for w in self._outbox if w.request.replica is not None and w.request.replica not in there]
        for waiting in absent:
            self._outbox.remove(waiting)
            if not waiting.future.done():
                said = f"replica {waiting.request.replica} is away, and request {waiting.request.id} is for it alone"
                waiting.future.set_exception(RequestLost(said))

    def _hold_suspects(self, outbox: list[_Waiting]) -> list[_Waiting]:
        """Return the requests to send now: all that are not suspects, and suspects of at most one prompt."""
        limit, losses = MOST_LOSSES - 1, self.replicas.losses
        if not losses and not self._suspects:
            return outbox
        suspects = [w for w in (*self._suspects, *outbox) if losses[w.request.id] >= limit and not w.future.done()]
        free = [w for w in outbox if losses[w.request.id] < limit]
        if suspects and not self._on_trial:
            self._on_trial = [w for w in suspects if w.prompt == suspects[0].prompt]
            free += self._on_trial
        self._suspects = [w for w in suspects if w not in self._on_trial]
        return free

    def _place(self, waiting: _Waiting, there: frozenset[int]) -> int:
        """Choose a replica for a request, and return its rank."""
        prefix = waiting.request.prefix
        rank, count = self._prefixes.get(prefix, (-1, 0)) if prefix else (-1, 0)
        if waiting.request.replica is not None:
            rank = waiting.request.replica
        if rank not in there:
            rank = self._load_balancer.least(there)
        if prefix:
            self._prefixes[prefix] = rank, count + 1
        self._load_balancer.add(rank, waiting.load)
        return rank

    def _leave(self, waiting: _Waiting) -> None:
        if waiting.rank < 0:
            return
        self._load_balancer.add(waiting.rank, -waiting.load)
        waiting.rank = -1
        if waiting in self._on_trial:
            self._on_trial.remove(waiting)
            if not self._on_trial and self._suspects:
                self._send_soon([])
        prefix = waiting.request.prefix
        if prefix:
            rank, count = self._prefixes.pop(prefix)
            if count > 1:
                self._prefixes[prefix] = rank, count - 1

    async def _serve(self, messages: dict[int, list[_Waiting]]) -> None:
        """Send each replica its requests, and settle them as their outcomes arrive."""
        twice = [rank for rank, batch in messages.items() if len({w.request.id for w in batch}) != len(batch)]
        for rank in twice:
            self._fail(messages.pop(rank), WhetError("two requests made at one time have the same id"))
        with self.replicas.asking(messages) as lives:
            batches = {rank: _Batch(rank, life, messages.pop(rank)) for rank, life in lives.items()}
            shares = {rank: batch.requests for rank, batch in batches.items()}
            streams = self.workers.streams("generate", shares, phase="generate")
        for left in messages.values():  # lost since `_place`: a new process has no weights yet
            self._send_again(left)
        failure: Exception | None = None
        try:
            async for heard in streams:
                self._hear(batches, heard)
        except Exception as error:  # the requests cannot cross the process boundary
            failure = error
        finally:
            await close_stream(streams)
            for batch in batches.values():
                self._end(batch, failure or batch.unanswered)

    def _hear(self, batches: dict[int, _Batch], heard: Heard) -> None:
        batch = batches.get(heard.rank)
        if batch is None:  # the batch has failed already
            return
        error = heard.error
        try:
            for outcomes in heard.items:
                for outcome in outcomes:
                    self._settle(batch.open, outcome)
        except Exception as raised:  # a worker may send anything: waiting tasks must get the error
            error = raised
        if heard.over or error is not None:
            del batches[heard.rank]
            self._end(batch, error or batch.unanswered)

    def _end(self, batch: _Batch, error: Exception) -> None:
        """End a batch. Its open requests go to other replicas, or fail with the error."""
        left = list(batch.open.values())
        if not isinstance(error, WorkerLost):
            if not isinstance(error, WhetError):
                error = WorkerError("generator", batch.rank, "generate", repr(error))
            return self._fail(left, error)
        self.replicas.losses.update(id_ for id_, waiting in batch.open.items() if not waiting.future.done())
        return self._serve_elsewhere(batch.rank, batch.life, left, error)

    def _serve_elsewhere(self, rank: int, life: int, left: list[_Waiting], cause: WorkerLost) -> None:
        """Send the requests of a lost replica to other replicas, or fail the requests."""
        if not self.replicas.lost(rank, life, cause):
            suspects, self._suspects = self._suspects, []  # they only waited, so they are not blamed for this loss
            return self._fail([*suspects, *left], self.replicas.failure or cause)
        for waiting in left:
            self._leave(waiting)
            if self.replicas.losses[waiting.request.id] >= MOST_LOSSES and not waiting.future.done():
                waiting.future.set_exception(self._given_up(waiting.request, f"; the last: {cause}"))
        return self._send_again(left)

    def _send_again(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            self._leave(waiting)
        self._send_soon([waiting for waiting in batch if not waiting.future.done()])

    def _given_up(self, request: Request, last: str = "") -> RequestLost:
        losses = self.replicas.losses[request.id]
        return RequestLost(f"{losses} replicas were lost while they had request {request.id}{last}")

    def _settle(self, open_: dict[str, _Waiting], outcome: Any) -> None:
        if isinstance(outcome, Progress):
            running = open_.get(outcome.id)
            if running is not None and running.listener is not None and not running.future.done():
                running.listener.call(outcome)
            return
        id_ = outcome.id if isinstance(outcome, Completion) else outcome[0]
        waiting = open_.pop(id_, None)
        if waiting is None:
            return
        self._leave(waiting)
        if waiting.future.done():
            return
        if isinstance(outcome, Completion):
            self.replicas.losses.pop(id_, None)
            waiting.future.set_result(outcome)
        else:
            waiting.future.set_exception(WhetError(outcome[1]))

    def _fail(self, batch: list[_Waiting], error: BaseException) -> None:
        for waiting in batch:
            self._leave(waiting)
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _abort_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, {}
        self._spawn(self._abort(cancelled))

    async def _abort(self, ids: dict[int, list[str]]) -> None:
        streams = self.workers.streams("abort", ids, phase="abort")
        try:
            async for _ in streams:
                pass  # if an abort fails, its requests fail too
        finally:
            await close_stream(streams)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
