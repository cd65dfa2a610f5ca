"""The generator on the driver: one thread calls all ranks, a few tokens at a time, and does all else between calls.

    generate(request) -> waiting -> reserve blocks of a replica's cache -> next call of `step` -> ... -> completion
    receive_weights, sleep, wake -> orders, done between two calls

All ranks get the same calls in the same order, which is what lets them compute together. Requests join and leave
every `STEPS` tokens.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, evolve, field

from whet.data.records import Completion, Progress, Request
from whet.errors import WhetError
from whet.interfaces.generator import Listener, listener
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.interfaces.workers import Pending, Workers
from whet_generation.limits import completion_limit, context_length
from whet_megatron.generator.config import MegatronGeneratorConfig

if TYPE_CHECKING:
    from whet.interfaces.generator import OnWeightUpdate
    from whet.interfaces.workers import RoleContext

STEPS = 8
"""Most tokens of each request between two calls. A call takes less than a millisecond."""
GRACE_SECONDS = 10.0
"""`close` waits so long for a call under way."""
LOWEST_TEMPERATURE = 1e-3
"""The lowest temperature above 0: below, logprobs overflow."""
_ENDLESS = 1 << 20


@define(eq=False)
class _Waiting:
    """A request and who waits for it."""

    request: Request
    limit: int
    """The most tokens of its completion."""
    loop: asyncio.AbstractEventLoop
    listener: Listener | None
    future: "Future[Completion]" = field(factory=Future)


@define(eq=False)
class _Replica:
    """The ranks that hold one copy of the model, and their cache."""

    ranks: tuple[int, ...]
    blocks: int
    block_tokens: int
    max_batch: int
    running: dict[str, _Waiting] = field(factory=dict)
    added: list[_Waiting] = field(factory=list)
    """Requests of the next call, among those that run."""

    def needed(self, one: _Waiting) -> int:
        """Return the blocks that a request may need."""
        return -(-(len(one.request.tokens) + one.limit) // self.block_tokens)

    @property
    def free(self) -> int:
        """Return the blocks that no request has reserved; 0 where the batch is full."""
        if len(self.running) >= self.max_batch:
            return 0
        return self.blocks - sum(map(self.needed, self.running.values()))

    def begin(self, one: _Waiting) -> None:
        """Reserve the blocks of a request, and add it to the next call."""
        self.running[one.request.id] = one
        self.added.append(one)


@define(eq=False)
class _Order:
    """What is done between two calls."""

    call: Callable[[], Any]
    running: "OnWeightUpdate" = "drain"
    """What happens before to the requests that run."""
    done: "Future[Any]" = field(factory=Future)


class MegatronGenerator:
    """Replicas of a model of Megatron Core, each over one or several ranks. Implements
    `whet.interfaces.generator.Generator`.

    Logprobs are of `log_softmax(logits / temperature)` over the whole vocabulary, even if top-p or top-k restricts the
    sampling. A completion ends at the model's last position, even if `max_tokens` is larger. Where no weights are
    synced, as in an evaluation without training, it loads weights of its own, even if the config says `shared`.
    """

    def __init__(self, config: MegatronGeneratorConfig, context: "RoleContext") -> None:
        model = context.model
        if context.transport != IN_PLACE:
            config = evolve(config, weights="own")
        self._vocabulary = model.vocab_size
        self._max_length = context_length(0, context.max_context, model.max_positions) or _ENDLESS
        self._workers: Workers = context.worker_group.spawn(
            "whet_megatron.generator.worker:Worker",
            {
                "config": attrs.asdict(config),
                "model": model,
                "max_length": self._max_length,
                "seed": context.seed,
                "scratch": str(context.scratch.absolute()),
            },
        )
        places = self._workers.call("place", phase="start")
        self._replicas, self._of_rank = _replicas(places, config.max_batch)
        self._outbox: list[_Waiting] = []
        self._waiting: deque[_Waiting] = deque()
        self._aborted: set[str] = set()
        self._orders: deque[_Order] = deque()
        self._asleep = self._closed = False
        self._failure: Exception | None = None
        """Why the ranks can compute together no longer."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="whet-megatron-generator", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        """Return the completion of a request. Cancelling the awaiting task ends the request at one of its next tokens.

        Raises `WhetError` for a request that cannot be served, and while the generator sleeps.
        """
        if self._failure is not None or self._closed:
            raise self._failure or WhetError(f"request {request.id} comes after the generator was closed")
        if self._asleep:
            raise WhetError(f"request {request.id} comes while the generator sleeps; wake it first")
        one = self._accepted(request)
        if not self._outbox:  # requests that are made in this iteration of the event loop travel together
            one.loop.call_soon(self._send)
        self._outbox.append(one)
        try:
            return await asyncio.wrap_future(one.future)
        except asyncio.CancelledError:
            with self._changed:
                self._aborted.add(request.id)
                self._changed.notify_all()
            raise

    def _send(self) -> None:
        sent, self._outbox = self._outbox, []
        with self._changed:
            if not self._closed:
                self._waiting += sent
                self._changed.notify_all()
                return
        for one in sent:  # the thread that would fail them has ended, or is about to
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(WhetError(f"request {one.request.id} comes after the generator was closed"))

    def _accepted(self, request: Request) -> _Waiting:
        limit = completion_limit(
            request, self._max_length, self._vocabulary, "the generator megatron", LOWEST_TEMPERATURE
        )
        to = listener.get()
        one = _Waiting(
            request if to is None else evolve(request, progress=to.likeliest), limit, asyncio.get_running_loop(), to
        )
        one_of = self._replicas[0]
        if (needed := one_of.needed(one)) > one_of.blocks:
            tokens, holds = needed * one_of.block_tokens, one_of.blocks * one_of.block_tokens
            raise WhetError(
                f"request {request.id} needs {tokens} tokens of the cache, which holds {holds}; raise "
                "generator.cache_gib, or lower rollout.max_tokens"
            )
        return one

    def receive_weights(
        self, spec: TransferSpec, version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> Pending:
        """Start to receive new weights of one transfer. Requests made from now on wait for them.

        `on_weight_update` decides about running requests. `drain`: they finish with the old weights. `continue`: they
        go on with the new weights, and earlier tokens keep their keys and values. `abort`: they end with the tokens
        that they have and `stop="abort"`.
        """

        def take() -> None:
            self._workers.call(
                "receive_weights", spec, version, phase="weight_sync", timeout_seconds=spec.timeout_seconds
            )

        return self._order(_Order(take, on_weight_update))

    def sleep(self) -> int:
        """Free the cache, and the weights unless they are the backend's. Return the bytes, summed over ranks."""
        self._asleep = True
        given: int = sum(self._order(_Order(lambda: self._workers.call("sleep", phase="sleep"))).result())
        return given

    def wake(self) -> None:
        """Take the memory again."""
        self._order(_Order(lambda: self._workers.call("wake", phase="wake"))).result()
        with self._changed:
            self._asleep = False
            self._changed.notify_all()  # requests may have arrived since the thread last looked

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(GRACE_SECONDS)
        self._workers.close()  # ends a call that hangs
        self._thread.join()

    def _order(self, order: _Order) -> "Future[Any]":
        with self._changed:
            if self._closed:
                raise WhetError("the generator is closed")
            self._orders.append(order)
            self._changed.notify_all()
        return order.done

    def _serve(self) -> None:
        """Call the ranks until the generator is closed. The only thread that calls them."""
        while self._next():
            order = self._orders[0] if self._orders else None
            if order is not None and (order.running == "continue" or not self._running):
                self._orders.popleft()
                self._carry_out(order)
                continue
            if order is None and not self._asleep:
                self._begin_waiting()
            elif order is not None and order.running == "abort":
                self._aborted |= set(self._running)
            try:
                self._step()
            except Exception as error:  # of any rank: whoever waits must hear of it
                self._failure = error if self._workers.size > 1 else None  # others may wait for that rank for ever
                self._fail(error)
        self._fail(WhetError("the generator was closed"))

    def _next(self) -> bool:
        """Wait until there is something to do. Return whether there ever will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._orders or self._running or (self._waiting and not self._asleep)
            )
            return not self._closed

    @property
    def _running(self) -> Mapping[str, _Waiting]:
        return {id_: one for replica in self._replicas for id_, one in replica.running.items()}

    def _carry_out(self, order: _Order) -> None:
        try:
            order.done.set_result(order.call())
        except Exception as error:  # it belongs to whoever gave the order
            with suppress(WhetError):  # some ranks may have done it and others not
                self._workers.call("drop", phase="weight_sync")
            self._fail(error)
            order.done.set_exception(error)

    def _begin_waiting(self) -> None:
        """Assign waiting requests, in order, to the replicas with the most free blocks, as long as they fit."""
        while self._waiting:
            one = self._waiting[0]
            if one.future.cancelled():
                self._waiting.popleft()
                continue
            if one.request.replica is None:
                replica = max(self._replicas, key=lambda replica: replica.free)
            else:
                replica = self._of_rank[one.request.replica]
            if replica.free < replica.needed(one):
                return
            replica.begin(self._waiting.popleft())

    def _step(self) -> None:
        """Generate a few tokens on every replica, and hand out what they finished."""
        if not self._running:
            return
        with self._changed:
            aborted, self._aborted = self._aborted, set()
        arguments: list[tuple[Any, ...]] = [()] * self._workers.size
        for replica in self._replicas:
            added, replica.added = replica.added, []
            requests, limits = [one.request for one in added], [one.limit for one in added]
            for rank in replica.ranks:
                arguments[rank] = requests, limits, sorted(aborted & replica.running.keys()), STEPS
        for found in self._workers.scatter("step", arguments, phase="generate"):
            for outcome in found:
                self._settle(outcome)

    def _settle(self, outcome: Any) -> None:
        id_ = outcome[0] if isinstance(outcome, tuple) else outcome.id
        replica = next((replica for replica in self._replicas if id_ in replica.running), None)
        if replica is None:
            return
        if isinstance(outcome, Progress):
            one = replica.running[id_]
            if one.listener is not None and not one.future.done():
                with suppress(RuntimeError):  # the loop of the caller has ended meanwhile
                    one.loop.call_soon_threadsafe(one.listener.call, outcome)
            return
        one = replica.running.pop(id_)
        if not one.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Completion):
            one.future.set_result(outcome)
        else:
            one.future.set_exception(WhetError(outcome[1]))

    def _fail(self, error: Exception) -> None:
        """Fail all requests that run or wait."""
        with self._changed:
            left = [*self._running.values(), *self._waiting]
            self._waiting.clear()
            if self._closed:
                for order in self._orders:
                    order.done.set_exception(error)
        for replica in self._replicas:
            replica.running.clear()
            replica.added.clear()
        for one in left:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(error)


def _replicas(places: Sequence[Mapping[str, int]], max_batch: int) -> tuple[list[_Replica], list[_Replica]]:
    """Return the replicas, and the replica of each rank."""
    found: dict[int, _Replica] = {}
    blocks = min(place["blocks"] for place in places)
    for place in places:
        ranks = tuple(rank for rank, other in enumerate(places) if other["replica"] == place["replica"])
        found.setdefault(place["replica"], _Replica(ranks, blocks, place["block_tokens"], max_batch))
    return list(found.values()), [found[place["replica"]] for place in places]
