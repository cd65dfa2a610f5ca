"""Handles around the backend, the generator and the rollouts of a run. Each call runs inside context managers.

BackendHandle(backend, *turns.around("backend"), timed(spans, "backend"))      the turn, and a span within it
GeneratorHandle(generator, *turns.requests(), busy(spans))                     the gate, and a span within it
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from whet.data.spans import Spans
from whet.errors import PluginError
from whet.interfaces.backend import SavesInBackground
from whet.interfaces.clock import on_loop
from whet.interfaces.generator import Replicated
from whet.run.steps import Interrupted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.data.metrics import Metric
    from whet.data.records import Completion, Request
    from whet.interfaces.backend import Backend, Weights
    from whet.interfaces.generator import Generator, OnWeightUpdate
    from whet.interfaces.weights import TransferSpec
    from whet.interfaces.workers import Pending
    from whet.rollout.stream import RolloutStream

Around = Callable[[str], AbstractContextManager[Any]]
"""Name of a method -> context manager around its call."""
AroundRequest = Callable[[], AbstractAsyncContextManager[Any]]
"""Returns the context manager around a request."""

PHASES: Mapping[str, str] = MappingProxyType({"train": "train", "evaluate": "evaluate", "score": "score"})
"""Methods of a backend that are timed, and the names of their spans."""


def timed(spans: Spans, role: str = "backend", names: Mapping[str, str] = PHASES) -> Around:
    """Return a function that records the calls of the methods in `names` as spans."""
    return lambda method: spans.phase(role, names[method]) if method in names else nullcontext()


def busy(spans: Spans, role: str = "generator") -> AroundRequest:
    """Return a function that records one span from the first running request to the last completion."""
    running, span = 0, ExitStack()

    @asynccontextmanager
    async def request() -> AsyncIterator[None]:
        nonlocal running
        if running == 0:
            span.enter_context(spans.phase(role, "generate"))
        running += 1
        try:
            yield
        finally:
            running -= 1
            if running == 0:
                span.close()

    return request


class BackendHandle:
    """A backend whose calls run inside context managers, in their order."""

    def __init__(self, backend: "Backend", *around: Around) -> None:
        self._backend, self._managers = backend, around
        self.now: Callable[[], Mapping[str, int]] = dict
        """Returns the `step` of the run and its `steps` in all. Each batch has them in its `info`."""
        self.weights_change: Callable[[], None] = lambda: None
        """Called before weights change."""

    def _with_step(self, batch: "Batch") -> "Batch":
        return evolve(batch, info={**batch.info, **self.now()})

    @contextmanager
    def _around(self, method: str) -> Iterator[None]:
        with ExitStack() as stack:
            for around in self._managers:
                stack.enter_context(around(method))
            yield

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """See `Backend.train`."""
        self.weights_change()
        with self._around("train"):
            over = count_over and self._with_step(count_over)
            return self._backend.train(self._with_step(batch), loss, over)

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """See `Backend.evaluate`."""
        with self._around("evaluate"):
            return self._backend.evaluate(self._with_step(batch), loss)

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: "Weights" = "policy") -> dict[str, Any]:
        """See `Backend.score`."""
        with self._around("score"):
            return self._backend.score(self._with_step(batch), outputs, weights)

    def send_weights(self, spec: "TransferSpec") -> "Pending":
        """See `Backend.send_weights`."""
        with self._around("send_weights"):
            return self._backend.send_weights(spec)

    def save(self, folder: Path) -> "Pending":
        """See `Backend.save`."""
        with self._around("save"):
            return self._backend.save(folder)

    def start_save(self, folder: Path, background: bool) -> Callable[[], object]:
        """Start to save, and return once the weights may change. The function returned waits for durable files."""
        with self._around("save"):
            if background and isinstance(self._backend, SavesInBackground):
                pending = self._backend.save_in_background(folder)
                pending.taken()
                return pending.result
            self._backend.save(folder).result()
        return lambda: None

    def load(self, folder: Path) -> None:
        """See `Backend.load`."""
        with self._around("load"):
            self._backend.load(folder)

    def export(self, folder: Path) -> None:
        """See `Backend.export`."""
        with self._around("export"):
            self._backend.export(folder)

    def sleep(self) -> int | None:
        """See `Backend.sleep`."""
        return self._backend.sleep()

    def wake(self) -> None:
        """See `Backend.wake`."""
        self._backend.wake()

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()


class GeneratorHandle:
    """A generator whose requests run inside context managers, in their order."""

    def __init__(
        self, generator: "Generator", *around: AroundRequest, receiving: Callable[[], None] = lambda: None,
        loop: "AbstractEventLoop | None" = None, vocabulary: int = 0, name: str = "",
    ) -> None:  # fmt: skip
        """`receiving` is called before the generator receives weights; `loop` has the requests, None: the episode's.

        `vocabulary`: the number of tokens that the model has; 0: unknown. `name` is that of the generator in errors.
        """
        self._generator, self._managers, self._receiving, self._loop = generator, around, receiving, loop
        self._vocabulary, self._name = vocabulary, name

    def direct(self) -> "GeneratorHandle":
        """Return another handle of the generator, whose requests run inside no context manager."""
        return GeneratorHandle(self._generator, vocabulary=self._vocabulary, name=self._name)

    def present(self) -> tuple[int, int]:
        """See `Replicated.present`. A generator that is not replicated counts as one replica."""
        return self._generator.present() if isinstance(self._generator, Replicated) else (1, 1)

    async def generate(self, request: "Request") -> "Completion":
        """See `Generator.generate`."""
        return await on_loop(self._generate(request), self._loop)

    async def _generate(self, request: "Request") -> "Completion":
        async with AsyncExitStack() as stack:
            for around in self._managers:
                await stack.enter_async_context(around())
            completion = await self._generator.generate(request)
        known, tokens = self._vocabulary, getattr(completion, "tokens", ())
        if known and len(tokens) and (highest := int(np.max(tokens))) >= known:
            found = f"the generator {self._name!r} gave the token {highest} for request {request.id}"
            raise PluginError(f"{found}; the model has the tokens 0 to {known - 1}")
        return completion

    def receive_weights(
        self, spec: "TransferSpec", version: int, on_weight_update: "OnWeightUpdate" = "drain"
    ) -> "Pending":
        """See `Generator.receive_weights`."""
        self._receiving()
        return self._generator.receive_weights(spec, version, on_weight_update)

    def sleep(self) -> int | None:
        """See `Generator.sleep`."""
        return self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()

    def close(self) -> None:
        """See `Generator.close`."""
        self._generator.close()


class TimedRollouts:
    """A rollout stream whose waits are recorded as spans. A signal ends a wait at once."""

    def __init__(
        self, stream: "RolloutStream", spans: Spans, interruptible: Callable[[], Any],
        taken: Callable[["Batch"], None], turn: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wrap a stream. `taken` is called with each batch that `take` returns, `turn` before each wait."""
        self._stream, self._spans, self._interruptible, self._taken = stream, spans, interruptible, taken
        self._turn = turn

    def take(self, groups: int) -> "Batch":
        """Wait for this many groups that pass the filters; see `RolloutStream.take`."""
        self._turn()
        try:
            with self._interruptible(), self._spans.phase("rollout", "take"):
                batch = self._stream.take(groups)
        except Interrupted:
            self._stream.close()  # otherwise running requests would delay the save
            raise
        self._taken(batch)
        return batch
