"""Handles that do something around the calls of others: what they leave alone is passed on as it is."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whet.data.spans import Spans
from whet.run.steps import Interrupted

if TYPE_CHECKING:
    from whet.component import Spec
    from whet.data.batch import Batch
    from whet.data.metrics import Metric
    from whet.data.records import Completion, Request
    from whet.interfaces.backend import Backend, Weights
    from whet.interfaces.generator import Generator, OnWeightUpdate
    from whet.interfaces.weights import Link
    from whet.interfaces.workers import Pending
    from whet.rollout.stream import RolloutStream


class WrappedBackend:
    """A backend within another handle."""

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend

    def _around(self, phase: str) -> AbstractContextManager[None]:
        """Give what a call is made in; `phase` is the method's name."""
        return nullcontext()

    def train(self, batch: "Batch", loss: "Spec", count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """See `Backend.train`."""
        with self._around("train"):
            return self._backend.train(batch, loss, count_over)

    def evaluate(self, batch: "Batch", loss: "Spec") -> "Mapping[str, Metric]":
        """See `Backend.evaluate`."""
        with self._around("evaluate"):
            return self._backend.evaluate(batch, loss)

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: "Weights" = "policy") -> dict[str, Any]:
        """See `Backend.score`."""
        with self._around("score"):
            return self._backend.score(batch, outputs, weights)

    def send_weights(self, link: "Link") -> "Pending":
        """See `Backend.send_weights`."""
        with self._around("send_weights"):
            return self._backend.send_weights(link)

    def save(self, folder: Path) -> "Pending":
        """See `Backend.save`."""
        with self._around("save"):
            return self._backend.save(folder)

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


class WrappedGenerator:
    """A generator within another handle."""

    def __init__(self, generator: "Generator") -> None:
        self._generator = generator

    async def generate(self, request: "Request") -> "Completion":
        """See `Generator.generate`."""
        return await self._generator.generate(request)

    def receive_weights(self, link: "Link", version: int, on_weight_update: "OnWeightUpdate" = "drain") -> "Pending":
        """See `Generator.receive_weights`."""
        return self._generator.receive_weights(link, version, on_weight_update)

    def sleep(self) -> int | None:
        """See `Generator.sleep`."""
        return self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()

    def close(self) -> None:
        """See `Generator.close`."""
        self._generator.close()


class TimedBackend(WrappedBackend):
    """A backend whose phases are recorded as spans."""

    def __init__(
        self, backend: "Backend", spans: Spans, role: str = "backend",
        names: Mapping[str, str] = MappingProxyType({"train": "train", "evaluate": "evaluate", "score": "score"}),
    ) -> None:  # fmt: skip
        """`names` has the methods that are recorded, and under which names."""
        super().__init__(backend)
        self._spans, self._role, self._names = spans, role, names

    def _around(self, phase: str) -> AbstractContextManager[None]:
        return self._spans.phase(self._role, self._names[phase]) if phase in self._names else nullcontext()


class TimedGenerator(WrappedGenerator):
    """A generator whose busy times are recorded as spans: from the first request under way to the last completion."""

    def __init__(self, generator: "Generator", spans: Spans) -> None:
        super().__init__(generator)
        self._spans = spans
        self._running = 0
        self._busy = ExitStack()

    async def generate(self, request: "Request") -> "Completion":
        """See `Generator.generate`."""
        if self._running == 0:
            self._busy.enter_context(self._spans.phase("generator", "generate"))
        self._running += 1
        try:
            return await super().generate(request)
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy.close()


class TimedRollouts:
    """A rollout stream whose waits are recorded as spans, and end at once on a signal."""

    def __init__(
        self, stream: "RolloutStream", spans: Spans, interruptible: Callable[[], Any],
        taken: Callable[["Batch"], None], turn: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wrap a stream; `taken` sees each batch before it is handed out. `turn` waits for the generator's turn."""
        self._stream, self._spans, self._interruptible, self._taken = stream, spans, interruptible, taken
        self._turn = turn

    def take(self, groups: int) -> "Batch":
        """Wait for this many groups that pass the filters; see `RolloutStream.take`."""
        self._turn()
        try:
            with self._interruptible(), self._spans.phase("rollout", "take"):
                batch = self._stream.take(groups)
        except Interrupted:
            self._stream.close()  # or the answers under way would hold up whatever is to be saved
            raise
        self._taken(batch)
        return batch
