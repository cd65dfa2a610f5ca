"""The worker: holds the model, collects requests into batches, and takes new weights between them."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from attrs import define

from whet.cluster.host import compute_thread
from whet.cluster.slices import WorkerRank
from whet.data.records import Completion, Request
from whet.errors import RefitError, WhetError
from whet.refit.handover import receive
from whet.refit.link import Link
from whet_hf.decode import Aborts, Batch, decode, sort_batch
from whet_hf.loading import choose_decoder, load_model, take_weights
from whet_hf.stopping import StopStrings

log = logging.getLogger(__name__)

Outcome = Completion | tuple[str, str]
"""A completion, or (id, why the request cannot be served)."""

ROWS_PER_LANE = 16
"""A batch is cut into lanes, a thread each, of no fewer rows."""


@define(eq=False)
class _Queued:
    request: Request
    limit: int
    outcomes: "asyncio.Queue[list[Outcome]]"


class Worker:
    """One replica of the model. `generate` and `abort` run on an event loop, all else on another thread."""

    def __init__(
        self,
        rank: WorkerRank,
        *,
        path: str,
        dtype: str,
        trust_remote_code: bool,
        max_batch: int,
        cache_bytes: int,
        fused: bool,
    ) -> None:
        torch.set_num_threads(rank.threads)
        self._rank, self._max_batch = rank, max_batch
        self._device = torch.device(rank.device)
        self._model = load_model(path, dtype, rank.device, trust_remote_code)
        self._decoder = choose_decoder(self._model, fused=fused)
        self._strings = StopStrings(path)
        self._version, self._broken = 0, ""
        self._max_positions = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        self._cache_tokens = max(1, cache_bytes // cache_bytes_per_token(self._model))
        self._queue: list[_Queued] = []
        self._running: dict[str, _Queued] = {}
        self._runner: asyncio.Task[None] | None = None
        self._aborts = Aborts()
        self._busy = threading.Lock()
        self._lanes = _lanes(rank.threads) if rank.threads > 1 and self._device.type == "cpu" else None

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Queue requests; yield the outcomes of a batch's requests together when the batch ends."""
        outcomes: asyncio.Queue[list[Outcome]] = asyncio.Queue()
        refused: list[Outcome] = []
        mine: list[_Queued] = []
        for request in requests:
            try:
                mine.append(_Queued(request, self._limit(request), outcomes))
            except WhetError as error:
                refused.append((request.id, str(error)))
        self._queue += mine
        try:
            if refused:
                yield refused
            left = len(mine)
            while left:
                if self._runner is None or self._runner.done():
                    self._runner = asyncio.create_task(self._run())
                done = await outcomes.get()
                left -= len(done)
                yield done
        finally:
            self._queue = [q for q in self._queue if q.outcomes is not outcomes]
            self._aborts.add([q.request.id for q in self._running.values() if q.outcomes is outcomes])

    async def abort(self, ids: list[str]) -> AsyncIterator[None]:
        """End requests early with `stop="abort"`: those that wait at once, those that run at their next token.

        No ids: all that run.
        """
        if not ids:
            self._aborts.add_running()
        chosen = set(ids)
        for queued in [q for q in self._queue if q.request.id in chosen]:
            self._queue.remove(queued)
            none = Completion(queued.request.id, np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
            queued.outcomes.put_nowait([none])
        self._aborts.add([id_ for id_ in ids if id_ in self._running])
        yield None

    def receive_weights(self, link: Link, version: int) -> None:
        """Take the weights of a hand-over. Until one is complete after a failed one, nothing is generated."""
        with self._busy:
            try:
                take_weights(self._model, receive(link, self._rank.rank))
            except BaseException as error:
                self._broken = str(error)
                raise
            self._decoder.refresh()
            self._version, self._broken = version, ""

    def sleep(self) -> None:
        """Free the cache, and on a GPU the weights."""
        with self._busy:
            self._decoder.free()

    def wake(self) -> None:
        """Bring back what `sleep` freed; the cache comes with the next batch."""

    def close(self) -> None:
        """End the threads."""
        if self._lanes is not None:
            self._lanes.shutdown(wait=False)

    def _limit(self, request: Request) -> int:
        """Say how many tokens the completion may have. Raises `WhetError` for a request that cannot be served."""
        length, limit = len(request.tokens), request.sampling.max_tokens
        if length == 0:
            raise WhetError(f"request {request.id} has an empty prompt; there is nothing to continue")
        if limit < 1:
            raise WhetError(f"request {request.id} asks for {limit} tokens, wanted at least 1")
        if not 0 <= int(request.tokens.min()) <= int(request.tokens.max()) < self._decoder.vocab_size:
            raise WhetError(f"request {request.id} has a token outside the vocabulary of {self._decoder.vocab_size}")
        if self._max_positions and length >= self._max_positions:
            raise WhetError(
                f"request {request.id} has a prompt of {length} tokens, which leaves no room in the model's "
                f"{self._max_positions} positions"
            )
        return min(limit, self._max_positions - length) if self._max_positions else limit

    async def _run(self) -> None:
        """Decode batch after batch until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next_batch()
            self._running = {queued.request.id: queued for queued in batch}
            self._aborts.clear()
            work = sort_batch([q.request for q in batch], [q.limit for q in batch])
            try:
                outcomes: list[Outcome] = list(await loop.run_in_executor(compute_thread(), self._decode, work))
            except WhetError as error:
                outcomes = [(queued.request.id, str(error)) for queued in batch]
            self._running = {}
            self._deliver(batch, {o.id if isinstance(o, Completion) else o[0]: o for o in outcomes})

    def _next_batch(self) -> list[_Queued]:
        """Take from the queue, in order, what fits the largest batch and the cache; at least one."""
        longest, count = 0, 0
        for queued in self._queue[: self._max_batch]:
            longest = max(longest, len(queued.request.tokens) + queued.limit)
            if count and (count + 1) * longest > self._cache_tokens:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _decode(self, batch: Batch) -> list[Completion]:
        with self._busy:
            if self._broken:
                raise RefitError(f"the generator has no weights to use, as the last hand-over failed: {self._broken}")
            parts = split(batch, self._rank.threads if self._lanes else 1)
            if len(parts) == 1 or self._lanes is None:
                return self._decode_lane(batch, 0)
            futures: list[Future[list[Completion]]] = [
                self._lanes.submit(self._decode_lane, part, lane) for lane, part in enumerate(parts)
            ]
            return [completion for future in futures for completion in future.result()]

    def _decode_lane(self, batch: Batch, lane: int) -> list[Completion]:
        return decode(self._decoder, batch, self._strings, self._version, self._aborts, self._device, lane)

    def _deliver(self, batch: list[_Queued], outcomes: dict[str, Outcome]) -> None:
        """Give each message the outcomes of its requests as one list."""
        messages: dict[int, list[_Queued]] = {}
        for queued in batch:
            messages.setdefault(id(queued.outcomes), []).append(queued)
        for mine in messages.values():
            mine[0].outcomes.put_nowait([outcomes[queued.request.id] for queued in mine])


def split(batch: Batch, lanes: int) -> list[Batch]:
    """Cut a sorted batch into parts of about equal length for threads, not within equal prompts where it can be."""
    count = len(batch.requests)
    lanes = max(1, min(lanes, count // ROWS_PER_LANE))
    cuts = [0]
    for lane in range(1, lanes):
        cut = count * lane // lanes
        cuts.append(cut)
    return [
        Batch(batch.requests[a:b], batch.limits[a:b]) for a, b in zip(cuts, [*cuts[1:], count], strict=True) if a < b
    ]


def cache_bytes_per_token(model: Any) -> int:
    """Estimate the bytes of keys and values of one token."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * 4)


def _lanes(threads: int) -> ThreadPoolExecutor:
    """Start threads that compute with one thread each."""
    pool = ThreadPoolExecutor(threads, "whet-hf-lane", initializer=torch.set_num_threads, initargs=(1,))
    with suppress(threading.BrokenBarrierError):
        barrier = threading.Barrier(threads)
        list(pool.map(lambda _: barrier.wait(10), range(threads)))
    # Setting a thread's number of threads also sets that of threads to come.
    torch.set_num_threads(threads)
    return pool
