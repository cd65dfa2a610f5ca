"""Brings requests to the replicas of a generator: many made together travel in one message to each.

    generate(request) -> outbox -> (no new ones for a turn of the event loop) -> one message per replica
                      <- future <- lists of completions, as each decoded batch ends

The worker's side is an async generator `generate(requests)` that yields lists of outcomes: a `Completion`, or
`(id, message)` for a request that cannot be served; and `abort(ids)`, which ends requests early.

A request whose replica is lost goes to another one, or waits until there is one, with its id and seed as they were.
One that was there at two losses is a suspect. Suspects are served a prompt at a time: where a replica is lost with one,
that one is given up, and not those that were only near it.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from attrs import Factory, define, field

from whet.cluster.slices import Workers
from whet.data.records import Completion, Request
from whet.errors import RequestLost, WhetError, WorkerError, WorkerLost
from whet.rollout.roster import Roster

PATIENCE = 8
"""Turns of the event loop that an outbox may wait for more at most."""
MOST_LOSSES = 3
"""A request that was with so many replicas when they were lost is held to be what kills them, and not served again."""


@define(eq=False)
class _Waiting:
    request: Request
    future: "asyncio.Future[Completion]"
    rank: int = -1
    """-1: not sent yet."""

    @property
    def prompt(self) -> str:
        """A name that the samples of one prompt share."""
        return self.request.prefix or self.request.id

    @property
    def load(self) -> int:
        return len(self.request.tokens) + self.request.sampling.max_tokens


@define(eq=False)
class RequestDispatcher:
    """Spreads requests over replicas by their outstanding tokens; equal prefixes go to one replica.

    To be used from one event loop.
    """

    workers: Workers
    roster: Roster = field(default=Factory(lambda self: Roster(self.workers), takes_self=True))
    _outbox: list[_Waiting] = field(factory=list, init=False)
    _patience: int = field(default=0, init=False)
    _loads: list[int] = field(init=False)
    _prefixes: dict[str, tuple[int, int]] = field(factory=dict, init=False)
    """Of prefixes under way: replica and number of requests."""
    _tasks: "set[asyncio.Task[None]]" = field(factory=set, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _suspects: list[_Waiting] = field(factory=list, init=False)
    """Wait for those on trial."""
    _on_trial: list[_Waiting] = field(factory=list, init=False)
    """Suspects that are being served: all of one prompt."""
    _cancelled: dict[int, list[str]] = field(factory=dict, init=False)
    """By replica: requests whose waiting task was cancelled in this turn of the loop."""

    def __attrs_post_init__(self) -> None:
        self._loads = [0] * self.workers.size

    async def generate(self, request: Request) -> Completion:
        """Have one request served. Cancelling the awaiting task aborts it at the worker.

        Raises `WhetError` where the request cannot be served, `RequestLost` where replicas were lost with it again and
        again or the one that it names is away, `WorkerError` where a replica fails or there is none left.
        """
        if self.roster.losses[request.id] >= MOST_LOSSES:  # in an earlier sitting: its process was not its own
            raise self._given_up(request)
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(request, self._loop.create_future())
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
        """Look again who is there. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: self._flush(len(self._outbox)))

    @property
    def outstanding(self) -> list[int]:
        """Tokens under way at each replica, prompts and limits counted."""
        return list(self._loads)

    def _send_soon(self, waiting: list[_Waiting]) -> None:
        if not self._outbox:
            self._patience = PATIENCE
            asyncio.get_running_loop().call_soon(self._flush, 0)
        self._outbox += waiting

    def _flush(self, seen: int) -> None:
        if len(self._outbox) != seen and self._patience > 0:
            # More may come: episodes that got their completions together ask for their next turns
            # within a few turns of the loop, and batches should not depend on how many.
            self._patience -= 1
            asyncio.get_running_loop().call_soon(self._flush, len(self._outbox))
            return None
        present, failure = self.roster.present(), self.roster.failure
        if failure is None:
            self._refuse_absent(frozenset(present))
        if not present and failure is None:
            return None  # `wake` comes back
        outbox, self._outbox = [w for w in self._outbox if not w.future.done()], []
        if failure is not None:
            held, self._suspects = self._suspects, []
            return self._fail(outbox + held, failure)
        messages: dict[int, list[_Waiting]] = {}
        there, least = frozenset(present), [(self._loads[rank], rank) for rank in present]
        heapq.heapify(least)
        for waiting in self._hold_suspects(outbox):
            waiting.rank = self._place(waiting, there, least)
            messages.setdefault(waiting.rank, []).append(waiting)
        for rank, batch in messages.items():
            self._spawn(self._serve(rank, batch))
        return None

    def _refuse_absent(self, there: frozenset[int]) -> None:
        """Refuse what names a replica that is away: nobody else is to answer it, and nobody waits for that one."""
        absent = [w for w in self._outbox if w.request.replica is not None and w.request.replica not in there]
        for waiting in absent:
            self._outbox.remove(waiting)
            if not waiting.future.done():
                said = f"replica {waiting.request.replica} is away, and request {waiting.request.id} is for it alone"
                waiting.future.set_exception(RequestLost(said))

    def _hold_suspects(self, outbox: list[_Waiting]) -> list[_Waiting]:
        """Give what is to be sent now: all but suspects, and of those the samples of one prompt."""
        limit, losses = MOST_LOSSES - 1, self.roster.losses
        suspects = [w for w in (*self._suspects, *outbox) if losses[w.request.id] >= limit and not w.future.done()]
        free = [w for w in outbox if losses[w.request.id] < limit]
        if suspects and not self._on_trial:
            self._on_trial = [w for w in suspects if w.prompt == suspects[0].prompt]
            free += self._on_trial
        self._suspects = [w for w in suspects if w not in self._on_trial]
        return free

    def _place(self, waiting: _Waiting, there: frozenset[int], least: list[tuple[int, int]]) -> int:
        """Choose a replica. `least` is a heap of the loads and ranks of those there, as they were or lower."""
        prefix = waiting.request.prefix
        rank, count = self._prefixes.get(prefix, (-1, 0)) if prefix else (-1, 0)
        if waiting.request.replica is not None:
            rank = waiting.request.replica
        if rank not in there:
            while least[0][0] != self._loads[least[0][1]]:
                heapq.heapreplace(least, (self._loads[least[0][1]], least[0][1]))
            rank = least[0][1]
        if prefix:
            self._prefixes[prefix] = rank, count + 1
        self._loads[rank] += waiting.load
        return rank

    def _leave(self, waiting: _Waiting) -> None:
        if waiting.rank < 0:
            return
        self._loads[waiting.rank] -= waiting.load
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

    async def _serve(self, rank: int, batch: list[_Waiting]) -> None:
        open_ = {waiting.request.id: waiting for waiting in batch}
        if len(open_) != len(batch):
            return self._fail(batch, WhetError("two requests made at one time have the same id"))
        with self.roster.asking(rank) as life:
            if life is None:  # lost since it was chosen: a fresh process has no weights to serve with
                for waiting in batch:
                    self._leave(waiting)
                return self._send_soon([waiting for waiting in batch if not waiting.future.done()])
            stream = self.workers.stream(rank, "generate", [w.request for w in batch], phase="generate")
        cause: BaseException | None = None
        served_again = False
        try:
            async for outcomes in stream:
                for outcome in outcomes:
                    self._settle(open_, outcome)
        except WorkerLost as error:
            self.roster.losses.update(id_ for id_, waiting in open_.items() if not waiting.future.done())
            served_again = self.roster.lost(rank, life, error)
            cause = error if served_again else self.roster.failure or error
            if not served_again:  # suspects that only waited must not be sent to a dead process, and blamed for it
                held, self._suspects = self._suspects, []
                self._fail(held, cause)
        except WhetError as error:
            cause = error
        except Exception as error:  # a worker's edge: whatever came must reach those who wait
            cause = WorkerError("generator", rank, "generate", repr(error))
        finally:
            await _close(stream)
            left = list(open_.values())
            if served_again and cause is not None:
                self._serve_again(left, cause)
            else:
                self._fail(left, cause or WorkerError("generator", rank, "generate", "it ended without answering"))
        return None

    def _serve_again(self, batch: list[_Waiting], cause: BaseException) -> None:
        for waiting in batch:
            self._leave(waiting)
            if self.roster.losses[waiting.request.id] >= MOST_LOSSES and not waiting.future.done():
                waiting.future.set_exception(self._given_up(waiting.request, f"; the last: {cause}"))
        self._send_soon([waiting for waiting in batch if not waiting.future.done()])

    def _given_up(self, request: Request, last: str = "") -> RequestLost:
        losses = self.roster.losses[request.id]
        return RequestLost(f"{losses} replicas were lost while they had request {request.id}{last}")

    def _settle(self, open_: dict[str, _Waiting], outcome: Any) -> None:
        id_ = outcome.id if isinstance(outcome, Completion) else outcome[0]
        waiting = open_.pop(id_, None)
        if waiting is None:
            return
        self._leave(waiting)
        if waiting.future.done():
            return
        if isinstance(outcome, Completion):
            self.roster.losses.pop(id_, None)
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
        for rank, ids in cancelled.items():
            self._spawn(self._abort(rank, ids))

    async def _abort(self, rank: int, ids: list[str]) -> None:
        stream = self.workers.stream(rank, "abort", ids, phase="abort")
        try:
            async for _ in stream:
                pass
        except WorkerError:
            pass  # the requests themselves fail with it
        finally:
            await _close(stream)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close(stream: AsyncIterator[Any]) -> None:
    close: Callable[[], Any] | None = getattr(stream, "aclose", None)
    if close is not None:
        await close()
