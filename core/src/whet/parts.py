"""What an algorithm gets: `Parts`. It never learns which backend, generator or launcher stands behind them."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.component import Selection, Spec
from whet.config.build import build_selection
from whet.refit.link import Link
from whet.spans import Spans
from whet.steps import Interrupted

if TYPE_CHECKING:
    from whet.cluster.slices import Pending
    from whet.config.sections import Config
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.offline import OfflineData
    from whet.data.records import Completion, Request
    from whet.interfaces.algorithm import Algorithm
    from whet.interfaces.backend import Backend, Weights
    from whet.interfaces.generator import Generator, Running
    from whet.metrics import Metric
    from whet.rollout.stream import RolloutStream
    from whet.steps import Steps


@frozen
class Parts:
    """The parts of a run, ready to use."""

    config: "Config"
    algorithm: "Algorithm"
    hooks: Any
    """Calls hooks of all plugins, e.g. `parts.hooks.whet_run(algorithm=..., parts=...)`."""
    backend: "Backend"
    generator: "Generator | None"
    chat: "ChatTokenizer"
    loss: Spec
    """The algorithm's loss, as it travels to the backend's workers."""
    rollouts: "TimedRollouts | None"
    """Of algorithms fed by rollouts: `take(n)` gives a batch of n groups."""
    data: "OfflineData | None"
    """Of algorithms fed by data files."""
    refit: Callable[..., None]
    """`refit(version=n)` hands the backend's weights to the generator."""
    steps: "Steps"
    """Iterate over it: the steps that are left."""
    evaluate: Callable[[int], "Mapping[str, Metric]"]
    """`evaluate(step)` evaluates on the environments of the config's `evaluation`."""
    seed: int

    def build(self, selection: Selection) -> Any:
        """Build a component that runs on the driver, e.g. an advantage estimator."""
        return build_selection(selection)


class TimedBackend:
    """A backend whose phases are recorded as spans."""

    def __init__(self, backend: "Backend", spans: Spans) -> None:
        self._backend, self._spans = backend, spans

    def train(self, batch: "Batch", loss: Spec, count_over: "Batch | None" = None) -> "Mapping[str, Metric]":
        """See `Backend.train`."""
        with self._spans.phase("backend", "train"):
            return self._backend.train(batch, loss, count_over)

    def evaluate(self, batch: "Batch", loss: Spec) -> "Mapping[str, Metric]":
        """See `Backend.evaluate`."""
        with self._spans.phase("backend", "evaluate"):
            return self._backend.evaluate(batch, loss)

    def score(self, batch: "Batch", outputs: tuple[str, ...], weights: "Weights" = "policy") -> dict[str, Any]:
        """See `Backend.score`."""
        with self._spans.phase("backend", "score"):
            return self._backend.score(batch, outputs, weights)

    def send_weights(self, link: Link) -> "Pending":
        """See `Backend.send_weights`."""
        return self._backend.send_weights(link)

    def save(self, folder: Path) -> "Pending":
        """See `Backend.save`."""
        return self._backend.save(folder)

    def load(self, folder: Path) -> None:
        """See `Backend.load`."""
        self._backend.load(folder)

    def export(self, folder: Path) -> None:
        """See `Backend.export`."""
        self._backend.export(folder)

    def sleep(self) -> None:
        """See `Backend.sleep`."""
        self._backend.sleep()

    def wake(self) -> None:
        """See `Backend.wake`."""
        self._backend.wake()

    def close(self) -> None:
        """See `Backend.close`."""
        self._backend.close()


class TimedGenerator:
    """A generator whose busy times are recorded as spans: from the first request under way to the last completion."""

    def __init__(self, generator: "Generator", spans: Spans) -> None:
        self._generator, self._spans = generator, spans
        self._running = 0
        self._busy = ExitStack()

    async def generate(self, request: "Request") -> "Completion":
        """See `Generator.generate`."""
        if self._running == 0:
            self._busy.enter_context(self._spans.phase("generator", "generate"))
        self._running += 1
        try:
            return await self._generator.generate(request)
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy.close()

    def receive_weights(self, link: Link, version: int, running: "Running" = "drain") -> "Pending":
        """See `Generator.receive_weights`."""
        return self._generator.receive_weights(link, version, running)

    def sleep(self) -> None:
        """See `Generator.sleep`."""
        self._generator.sleep()

    def wake(self) -> None:
        """See `Generator.wake`."""
        self._generator.wake()

    def close(self) -> None:
        """See `Generator.close`."""
        self._generator.close()


class TimedRollouts:
    """A rollout stream whose waits are recorded as spans, and end at once on a signal."""

    def __init__(self, stream: "RolloutStream", spans: Spans, interruptible: Callable[[], Any]) -> None:
        self._stream, self._spans, self._interruptible = stream, spans, interruptible

    def take(self, groups: int) -> "Batch":
        """Wait for this many groups that pass the filters, in order of admission."""
        try:
            with self._interruptible(), self._spans.phase("rollout", "take"):
                return self._stream.take(groups)
        except Interrupted:
            self._stream.close()  # or the answers under way would hold up whatever is to be saved
            raise


class Refit:
    """Hands weights from backend to generator: both ends at once, under a deadline, complete or refused."""

    def __init__(
        self, backend: "Backend", generator: "Generator", transport: str, address: str, dtype: str,
        timeout_seconds: float, spans: Spans, after: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._backend, self._generator, self._spans, self._after = backend, generator, spans, after
        self._transport, self._address, self._dtype, self._timeout = transport, address, dtype, timeout_seconds
        self._count = itertools.count()

    def __call__(self, *, version: int) -> None:
        """Hand over the weights made by step `version`."""
        session = f"{version}-{next(self._count)}"
        link = Link(self._transport, self._address, session, version, self._dtype, timeout_seconds=self._timeout)
        with self._spans.phase("backend", "refit"):
            ends = [self._backend.send_weights(link), self._generator.receive_weights(link, version)]
            for end in ends:
                end.result()
        self._after(version)


@contextmanager
def closing_all(closers: list[Callable[[], None]]) -> Iterator[list[Callable[[], None]]]:
    """Call what is in the list at the end, last first; the first error that a closer raises comes through."""
    try:
        yield closers
    finally:
        first: BaseException | None = None
        for close in reversed(closers):
            try:
                close()
            except BaseException as error:  # every other closer must still have its turn
                first = first or error
        if first is not None:
            raise first
