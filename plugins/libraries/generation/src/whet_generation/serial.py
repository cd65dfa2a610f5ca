"""A generator that serves one request after another: the handle on the driver, and the worker around an engine.

    class MyGenerator(SerialGenerator):          # generator.py; imports no engine
        worker = "my_package.worker:Worker"

    class Worker(SerialWorker):                  # worker.py
        def start(self): ...                     # load the model
        def continued(self, request): ...        # yield (token, logprob), one after the other
        def decode(self, tokens): ...            # tokens -> text, for stop strings
        def take(self, spec): ...                # receive new weights
        def move(self, device): ...              # release memory and take it again

The worker knows when a completion ends, who waits for it, and which weights made it.
"""

import asyncio
import operator
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import numpy as np

from whet.component import import_path, resolve
from whet.config.structure import structure, unstructure
from whet.data.model_info import ModelInfo
from whet.data.records import Completion, Progress, Request, Stop
from whet.errors import PluginError, WeightSyncError
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import RoleContext, WorkerRank
from whet.runtime.worker_process import compute_thread
from whet_generation.completeness import one_token
from whet_generation.replicas import ReplicatedGenerator

Outcome = Completion | Progress | tuple[str, str]
"""A completion, or a token of a running one, or (id, why the request cannot be served)."""


class SerialGenerator(ReplicatedGenerator):
    """The handle on the driver. Requests are spread over the ranks. A subclass sets `worker`."""

    worker: str = ""
    """Import path of the subclass of `SerialWorker`."""

    def __init__(self, config: Any, context: RoleContext) -> None:
        described = {"config": unstructure(config, portable=True), "config_type": import_path(type(config))}
        super().__init__(self.worker, {**described, "model": context.model}, context)


class SerialWorker:
    """The worker: `generate` and `abort` run on an event loop, and all else on one other thread.

    The only mode for running requests when new weights arrive is `drain`: they finish first.
    """

    positions: int = 1 << 30
    """Length of the longest sequence that the model can continue, in tokens, set by `start`."""

    def __init__(self, rank: WorkerRank, config: Mapping[str, Any], config_type: str, model: ModelInfo) -> None:
        self.rank, self.info = rank, model
        self.config: Any = structure(dict(config), resolve(config_type), None)
        self._wanted: set[str] = set()
        """Running and waiting requests. A request that is removed ends at its next token."""
        self._version, self._broken = 0, ""
        self._busy = threading.Lock()
        """Held while weights are read or written: in the driver's own process they arrive on its thread."""
        self.start()

    # What a subclass writes

    def start(self) -> None:
        """Load the model of the folder `self.info.path`, with `self.rank.threads` threads, on `self.rank.device`."""
        raise NotImplementedError("override `start` to load the model")

    def continued(self, request: Request) -> Iterator[tuple[int, float]]:
        """Yield tokens that continue the request's tokens, each with its logprob, without end.

        The tokens depend on the request's tokens, sampling and seed alone. The next token is wanted after the last one
        is taken, so an engine computes no token in vain.
        """
        raise NotImplementedError("override `continued` to sample tokens")

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special tokens included. Requests with stop strings need it."""
        raise NotImplementedError("override `decode` to find stop strings")

    def take(self, spec: TransferSpec) -> None:
        """Receive all weights of a transfer. Raise any error if one is missing or has another shape."""
        raise NotImplementedError("override `take` to receive weights")

    def move(self, device: str) -> None:
        """Move the model to a device: to `cpu` for sleep, and back to `self.rank.device`."""

    # What the driver calls

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Outcome]]:
        """Serve requests in their order, and yield each outcome as soon as it is known."""
        ids = {request.id for request in requests}
        self._wanted |= ids
        try:
            for request in requests:
                async for outcome in self._outcomes(request):
                    yield [outcome]
        finally:
            self._wanted -= ids

    async def _outcomes(self, request: Request) -> AsyncIterator[Outcome]:
        """Serve one request. Yield its tokens one by one, if it wants them, and then its outcome."""
        loop, tokens = asyncio.get_running_loop(), asyncio.Queue[Progress | None]()

        def report(token: Progress) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        serving = loop.run_in_executor(compute_thread(), self._serve, request, report)
        serving.add_done_callback(lambda _: tokens.put_nowait(None))
        while (token := await tokens.get()) is not None:
            yield token
        yield await serving

    async def abort(self, ids: list[str]) -> AsyncIterator[None]:
        """End requests early; without ids, all of them."""
        self._wanted.difference_update(ids or list(self._wanted))
        yield None

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: str = "drain") -> None:
        """Receive the weights of a weight sync. After a failed one nothing is generated until another is complete."""
        with self._busy:
            self._broken = "it was not complete"
            try:
                self.take(spec)
            except Exception as error:  # of the author's engine
                raise WeightSyncError(f"the weights of version {version} were not taken: {error}") from error
            self._version, self._broken = version, ""

    def sleep(self) -> None:
        """Release memory."""
        with self._busy:
            self.move("cpu")

    def wake(self) -> None:
        """Take the memory again."""
        with self._busy:
            self.move(self.rank.device)

    def _serve(self, request: Request, report: Callable[[Progress], object]) -> Outcome:
        if request.sampling.schema:
            return request.id, "this generator cannot hold a text to a JSON schema"
        with self._busy:
            if self._broken:
                return request.id, f"there are no weights to use, as the last weight sync failed: {self._broken}"
            if not 1 <= len(request.tokens) < self.positions:
                return request.id, f"a prompt of {len(request.tokens)} tokens, wanted 1 to {self.positions - 1}"
            return self._complete(request, report)

    def _complete(self, request: Request, report: Callable[[Progress], object]) -> Completion:
        sampling, tokens, logprobs = request.sampling, list[int](), list[float]()
        following, stop = self.continued(request), "length"
        while len(tokens) < min(sampling.max_tokens, self.positions - len(request.tokens)):
            if request.id not in self._wanted:
                stop = "abort"
                break
            token, logprob = self._next(following, len(tokens))
            tokens.append(token)
            logprobs.append(logprob)
            if request.progress is not None:
                report(one_token(request.id, len(tokens) - 1, token, logprob))
            if token in sampling.stop_tokens or any(text in self.decode(tokens) for text in sampling.stop):
                stop = "stop"
                break
        ended: Stop = stop  # type: ignore[assignment]  # one of the three words above
        versions = ((0, self._version),) if tokens else ()
        return Completion(request.id, np.array(tokens, np.int64), np.array(logprobs, np.float32), ended, versions)

    def _next(self, following: Iterator[tuple[int, float]], count: int) -> tuple[int, float]:
        """Return the next token and its logprob. Raises `PluginError` if the author's engine breaks the contract."""
        who, found = f"`continued` of {type(self).__name__}", next(following, None)
        if found is None:
            raise PluginError(
                f"{who} ended after {count} tokens; it must yield without end: the worker takes no more tokens once a "
                "completion has a stop token, a stop string or its length"
            )
        token, logprob = found
        try:
            return operator.index(token), logprob
        except TypeError:
            raise PluginError(
                f"{who} yielded {token!r:.40} ({type(token).__name__}) as token {count}, wanted an integer"
            ) from None
