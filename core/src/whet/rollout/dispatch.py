"""Brings requests to the replicas of a generator: many made together travel in one message to each.

    generate(request) -> outbox -> (no new ones for a turn of the event loop) -> one message per replica
                      <- future <- lists of completions, as each decoded batch ends

The worker's side is an async generator `generate(requests)` that yields lists of outcomes: a `Completion`, or
`(id, message)` for a request that cannot be served; and `abort(ids)`, which ends requests early, where `[]` stands for
all that run.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from attrs import define, field

from whet.cluster.slices import Workers
from whet.data.records import Completion, Request
from whet.errors import WhetError, WorkerError

PATIENCE = 8
"""Turns of the event loop that an outbox may wait for more at most."""


@define(eq=False)
class _Waiting:
    request: Request
    future: "asyncio.Future[Completion]"
    rank: int = -1
    """-1: not sent yet."""

    @property
    def load(self) -> int:
        return len(self.request.tokens) + self.request.sampling.max_tokens


@define(eq=False)
class RequestDispatcher:
    """Spreads requests over replicas by their outstanding tokens; equal prefixes go to one replica.

    To be used from one event loop.
    """

    workers: Workers
    _outbox: list[_Waiting] = field(factory=list, init=False)
    _patience: int = field(default=0, init=False)
    _loads: list[int] = field(init=False)
    _prefixes: dict[str, tuple[int, int]] = field(factory=dict, init=False)
    """Of prefixes under way: replica and number of requests."""
    _tasks: "set[asyncio.Task[None]]" = field(factory=set, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _cancelled: dict[int, list[str]] = field(factory=dict, init=False)
    """By replica: requests whose waiting task was cancelled in this turn of the loop."""

    def __attrs_post_init__(self) -> None:
        self._loads = [0] * self.workers.size

    async def generate(self, request: Request) -> Completion:
        """Have one request served. Cancelling the awaiting task aborts it at the worker.

        Raises `WhetError` where the request cannot be served, `WorkerError` where the replica fails or dies.
        """
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(request, self._loop.create_future())
        if not self._outbox:
            self._patience = PATIENCE
            self._loop.call_soon(self._flush, 0)
        self._outbox.append(waiting)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.rank >= 0:
                if not self._cancelled:
                    self._loop.call_soon(self._abort_cancelled)
                self._cancelled.setdefault(waiting.rank, []).append(request.id)
            raise

    def abort_running(self) -> None:
        """End what the replicas decode at the moment with `stop="abort"`. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_all)

    @property
    def outstanding(self) -> list[int]:
        """Tokens under way at each replica, prompts and limits counted."""
        return list(self._loads)

    def _flush(self, seen: int) -> None:
        if len(self._outbox) != seen and self._patience > 0:
            # More may come: episodes that got their completions together ask for their next turns
            # within a few turns of the loop, and batches should not depend on how many.
            self._patience -= 1
            asyncio.get_running_loop().call_soon(self._flush, len(self._outbox))
            return
        outbox, self._outbox = [w for w in self._outbox if not w.future.done()], []
        messages: dict[int, list[_Waiting]] = {}
        for waiting in outbox:
            waiting.rank = self._place(waiting)
            messages.setdefault(waiting.rank, []).append(waiting)
        for rank, batch in messages.items():
            self._spawn(self._serve(rank, batch))

    def _place(self, waiting: _Waiting) -> int:
        prefix = waiting.request.prefix
        least = min(range(self.workers.size), key=self._loads.__getitem__)
        rank, count = self._prefixes.get(prefix, (least, 0)) if prefix else (least, 0)
        if prefix:
            self._prefixes[prefix] = rank, count + 1
        self._loads[rank] += waiting.load
        return rank

    def _leave(self, waiting: _Waiting) -> None:
        self._loads[waiting.rank] -= waiting.load
        prefix = waiting.request.prefix
        if prefix:
            rank, count = self._prefixes.pop(prefix)
            if count > 1:
                self._prefixes[prefix] = rank, count - 1

    async def _serve(self, rank: int, batch: list[_Waiting]) -> None:
        open_ = {waiting.request.id: waiting for waiting in batch}
        if len(open_) != len(batch):
            return self._fail(batch, WhetError("two requests made at one time have the same id"))
        stream = self.workers.stream(rank, "generate", [w.request for w in batch], phase="generate")
        cause: BaseException | None = None
        try:
            async for outcomes in stream:
                for outcome in outcomes:
                    self._settle(open_, outcome)
        except WhetError as error:
            cause = error
        except Exception as error:  # a worker's edge: whatever came must reach those who wait
            cause = WorkerError("generator", rank, "generate", repr(error))
        finally:
            await _close(stream)
            self._fail(
                list(open_.values()),
                cause or WorkerError("generator", rank, "generate", "it ended without answering"),
            )
        return None

    def _settle(self, open_: dict[str, _Waiting], outcome: Any) -> None:
        id_ = outcome.id if isinstance(outcome, Completion) else outcome[0]
        waiting = open_.pop(id_, None)
        if waiting is None:
            return
        self._leave(waiting)
        if waiting.future.done():
            return
        if isinstance(outcome, Completion):
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

    def _abort_all(self) -> None:
        for rank, load in enumerate(self._loads):
            if load:
                self._spawn(self._abort(rank, []))

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
