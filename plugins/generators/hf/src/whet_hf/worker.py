"""The worker: holds the model, groups requests into batches, and takes new weights between batches or tokens."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define

from whet.data.records import Completion, Progress, Request
from whet.errors import WhetError
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet.runtime.worker_process import compute_thread
from whet_generation.stopping import StopStrings
from whet_hf.decode import Aborts, Job, Report, decode
from whet_hf.loading import choose_decoder, load_model
from whet_hf.own import OwnWeights
from whet_hf.plain import PlainDecoder, max_positions
from whet_hf.shared import SharedWeights
from whet_hf.swap import Weights
from whet_ops.rotary import longest_alone
from whet_ops.routing import COLUMN

log = logging.getLogger(__name__)

Outcome = Completion | Progress | tuple[str, str]
"""A completion, or a token of a running one, or (id, why the request cannot be served)."""

LOWEST_TEMPERATURE = 1e-3
"""The lowest temperature above 0. A request whose logprobs overflow would end its whole batch."""
LANE_PARAMETERS = 30_000_000
"""For models up to this size, each thread decodes a part of the batch; for larger models threads share operations."""
LANE_ROWS = 16
"""The smallest part of a batch that a thread gets."""


@define(eq=False)
class _Queued:
    job: Job
    outcomes: "asyncio.Queue[list[Outcome] | Exception]"

    @property
    def id(self) -> str:
        return self.job.request.id


class Worker:
    """One replica of the model. Coroutine methods run on an event loop, also while another thread decodes."""

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
        prefix_caching: bool,
        scratch: str,
        columns: list[str] | None = None,
        shared: bool = False,
    ) -> None:
        """`shared`: compute with the weights of the backend in this process."""
        torch.set_num_threads(rank.threads)
        self._rank, self._max_batch = rank, max_batch
        self._device = torch.device(rank.device)
        self._held = (
            SharedWeights(path, dtype, rank.device, trust_remote_code) if shared
            else OwnWeights(
                load_model(path, dtype, rank.device, trust_remote_code),
                Path(scratch) / "asleep" / f"{rank.role}-{rank.rank}",
            )
        )  # fmt: skip
        self._model, experts = self._held.model, COLUMN in (columns or ())
        model = self._model
        limit = most_cache_bytes(model, cache_bytes, max_batch) if prefix_caching else 0
        try:
            self._decoder = choose_decoder(model, fused=fused, movable=not shared, experts=experts, cache_bytes=limit)
        except BaseException:
            self._held.close()
            raise
        self._strings = StopStrings(path)
        self._weights = Weights()
        self._max_positions, self._longest_alone = max_positions(model), longest_alone(model)
        plain = self._decoder.cache_bytes if isinstance(self._decoder, PlainDecoder) else None
        self._cache_bytes, self._bytes = cache_bytes, plain or (cache_bytes_per_token(model), 0)
        self._queue: list[_Queued] = []
        self._running: list[_Queued] = []
        self._runner: asyncio.Task[None] | None = None
        self._aborts = Aborts()
        self._report: Report | None = None
        """Sends the tokens of the running batch; None: no request of it wants them."""
        self._busy = threading.Lock()
        # Threads cannot share modules that record experts, or into which the weights of experts are put for a moment.
        safe = not experts and not (shared and isinstance(self._decoder, PlainDecoder))
        small = safe and sum(p.numel() for p in model.parameters()) <= LANE_PARAMETERS
        self._lanes = _lanes(rank.threads) if rank.threads > 1 and small and rank.device == "cpu" else None

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Queue requests. Yields the outcomes of each batch together, when the batch ends; before them, its tokens one
        by one for requests that want them.
        """
        outcomes: asyncio.Queue[list[Outcome] | Exception] = asyncio.Queue()
        refused: list[Outcome] = []
        mine: list[_Queued] = []
        for request in requests:
            try:
                mine.append(_Queued(Job(request, self._limit(request)), outcomes))
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
                if isinstance(done, Exception):
                    raise done
                left -= sum(not isinstance(outcome, Progress) for outcome in done)
                yield done
        finally:
            self._queue = [q for q in self._queue if q.outcomes is not outcomes]
            self._aborts.add([q.id for q in self._running if q.outcomes is outcomes])

    async def abort(self, ids: list[str]) -> AsyncIterator[None]:
        """End requests early with `stop="abort"`: waiting requests at once, running requests at their next token."""
        chosen = set(ids)
        for queued in [q for q in self._queue if q.id in chosen]:
            self._queue.remove(queued)
            queued.outcomes.put_nowait(
                [Completion(queued.id, np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())]
            )
        self._aborts.add([q.id for q in self._running if q.id in chosen])
        yield None

    async def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate) -> None:
        """Take the weights of a weight sync. After a failed sync nothing is generated until a sync is complete.

        The running batch is drained, continues with the new weights, or is aborted. Waiting requests always get the
        new weights.
        """
        if on_weight_update == "continue":
            taken = self._weights.in_running_batch(lambda: self._take(spec, version))
            if taken is not None:
                await asyncio.wrap_future(taken)
                return
        if on_weight_update == "abort":
            self._aborts.add_running()
        loop = asyncio.get_running_loop()
        # Submitted now, so that it runs before the next batch.
        await loop.run_in_executor(compute_thread(), self._take_between_batches, spec, version)

    def _take_between_batches(self, spec: TransferSpec, version: int) -> None:
        with self._busy:
            self._take(spec, version)

    @torch.inference_mode(False)  # a running batch turns it on, and later weight syncs read what is mapped now
    def _take(self, spec: TransferSpec, version: int) -> None:
        try:
            taken = self._held.take(spec, self._rank.rank)
        except BaseException as error:
            self._weights.broken = str(error)
            raise
        if taken:
            self._decoder.refresh()
        self._weights.version, self._weights.broken = version, ""

    def sleep(self) -> int:
        """Free the memory of cache and weights. Returns the number of bytes."""
        with self._busy:
            return self._decoder.free() + self._held.sleep()

    @torch.inference_mode(False)
    def wake(self) -> None:
        """Bring the weights back, and apply an adapter that arrived meanwhile. The next batch allocates the cache."""
        with self._busy:
            self._held.wake()
            try:
                if self._held.apply_held():
                    self._decoder.refresh()
            except BaseException as error:
                self._weights.broken = str(error)
                raise

    def close(self) -> None:
        """Release the weights and stop the threads."""
        self._held.close()
        if self._lanes is not None:
            self._lanes.shutdown(wait=False)

    def _limit(self, request: Request) -> int:
        """Return the most tokens of the completion. Raises `WhetError` for a request that cannot be served."""
        length, limit = len(request.tokens), request.sampling.max_tokens
        if length == 0:
            raise WhetError(f"request {request.id} has an empty prompt; there is nothing to continue")
        if request.sampling.schema:
            raise WhetError(f"request {request.id} has a JSON schema, and the generator hf cannot hold a text to it")
        if not 0 <= int(request.tokens.min()) <= int(request.tokens.max()) < self._decoder.vocab_size:
            raise WhetError(f"request {request.id} has a token outside the vocabulary of {self._decoder.vocab_size}")
        if 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
            raise WhetError(
                f"request {request.id} asks for temperature {request.sampling.temperature:g}, at which logprobs are no "
                f"numbers; the lowest but 0 is {LOWEST_TEMPERATURE:g}"
            )
        if self._max_positions and length >= self._max_positions:
            raise WhetError(
                f"request {request.id} has a prompt of {length} tokens, which leaves no room in the model's "
                f"{self._max_positions} positions"
            )
        limit = min(limit, self._max_positions - length) if self._max_positions else limit
        if self._longest_alone is not None and length + limit > self._longest_alone:
            raise WhetError(
                f"request {request.id} may take {length + limit} tokens, and the model's rotary embeddings (longrope "
                f"or dynamic) follow the longest sequence of a pass beyond {self._longest_alone} tokens, so its tokens "
                f"would depend on its batch; set rollout.max_context to {self._longest_alone}"
            )
        return limit

    async def _run(self) -> None:
        """Decode batch after batch until no request waits."""
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._running = sorted(self._next_batch(), key=lambda queued: queued.job.place)
            self._aborts.clear()
            messages: dict[int, list[Outcome]] = {id(queued.outcomes): [] for queued in batch}
            receivers = {id(queued.outcomes): queued.outcomes for queued in batch}
            self._weights.begin()
            self._report = self._reporter(batch)
            try:
                completions = await loop.run_in_executor(compute_thread(), self._decode, [q.job for q in batch])
                for queued, completion in zip(batch, completions, strict=True):
                    messages[id(queued.outcomes)].append(completion)
                for key, outcomes in messages.items():
                    receivers[key].put_nowait(outcomes)
            except Exception as error:  # the edge of this task: the callers must get the error
                for receiver in receivers.values():
                    receiver.put_nowait(error)
            self._running = []

    def _reporter(self, batch: list[_Queued]) -> Report | None:
        """Return a function that sends the tokens of a batch to the callers that want them; None: no caller does."""
        receivers = {queued.id: queued.outcomes for queued in batch if queued.job.request.progress is not None}
        loop = asyncio.get_running_loop()

        def report(tokens: list[Progress]) -> None:
            for token in tokens:
                found: list[Outcome] = [token]
                loop.call_soon_threadsafe(receivers[token.id].put_nowait, found)

        return report if receivers else None

    def _next_batch(self) -> list[_Queued]:
        """Remove from the queue, in order, the requests that fit `max_batch` and the cache. Returns at least one."""
        prompt, limit, count, (token, row) = 0, 0, 0, self._bytes
        for queued in self._queue[: self._max_batch]:
            # Prompts are right-aligned, so each row has room for the longest one and for the longest completion.
            prompt, limit = max(prompt, len(queued.job.request.tokens)), max(limit, queued.job.limit)
            if count and (count + 1) * ((prompt + limit) * token + row) > self._cache_bytes:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _decode(self, jobs: list[Job]) -> list[Completion]:
        with self._busy, ExitStack() as after:
            after.callback(self._weights.end)
            parts = split(jobs, self._rank.threads)
            if len(parts) == 1 or self._lanes is None:
                return self._decode_lane(jobs, 0)
            futures: list[Future[list[Completion]]] = [
                self._lanes.submit(self._decode_lane, part, lane) for lane, part in enumerate(parts)
            ]
            wait(futures)  # also when one has failed: the others use the weights and the cache
            return [completion for future in futures for completion in future.result()]

    def _decode_lane(self, jobs: list[Job], lane: int) -> list[Completion]:
        with self._weights.lane():
            return decode(
                self._decoder, jobs, self._strings, self._weights, self._aborts, self._device, lane, self._report
            )


def split(jobs: list[Job], lanes: int) -> list[list[Job]]:
    """Return sorted jobs in at most `lanes` parts of equal size."""
    lanes = max(1, min(lanes, len(jobs) // LANE_ROWS))
    cuts = [len(jobs) * lane // lanes for lane in range(lanes + 1)]
    return [jobs[a:b] for a, b in pairwise(cuts)]


def most_cache_bytes(model: Any, cache_bytes: int, max_batch: int) -> int:
    """Return the most bytes of keys and values: what `facts` states for a rank."""
    longest = max_positions(model)
    return min(cache_bytes, max_batch * longest * cache_bytes_per_token(model)) if longest else cache_bytes


def cache_bytes_per_token(model: Any) -> int:
    """Return an estimate of the bytes of keys and values of one token. 1: the config does not state them."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", 0)
    layers = getattr(config, "per_layer_config", None) or [config] * count  # Gemma 4 has layers of two sizes
    size = 4 if model.device.type == "cpu" else model.dtype.itemsize
    return max(1, sum(_numbers(layer) for layer in layers) * size)


def _numbers(layer: Any) -> int:
    """Return how many numbers the keys and values of one token are in a layer with this config."""
    heads = getattr(layer, "num_attention_heads", 0)
    if not heads:
        return 0
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_dim)


def _lanes(threads: int) -> ThreadPoolExecutor:
    """Return a pool of started threads; each computes with one thread of torch."""
    barrier = threading.Barrier(threads)

    def start() -> None:
        torch.set_num_threads(1)
        # A thread takes the number that any thread set last, when it first reads the number. So read it now.
        torch.get_num_threads()
        with suppress(threading.BrokenBarrierError):
            barrier.wait(10)

    pool = ThreadPoolExecutor(threads, "whet-hf-lane")
    list(pool.map(lambda _: start(), range(threads)))
    torch.set_num_threads(threads)
    return pool
