"""What an algorithm gets: `Parts`. It never learns which backend, generator or launcher stands behind them."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from whet.component import Selection, Spec
from whet.config.build import build_selection
from whet.refit.link import Link, Places
from whet.spans import Spans
from whet.steps import Interrupted
from whet.wrapped import WrappedBackend, WrappedGenerator

if TYPE_CHECKING:
    from whet.cluster.slices import Give
    from whet.config.sections import Config
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer
    from whet.data.offline import OfflineData
    from whet.data.records import Completion, Request
    from whet.interfaces.algorithm import Algorithm
    from whet.interfaces.backend import Backend
    from whet.interfaces.generator import Generator, Running
    from whet.metrics import Metric
    from whet.refit.probe import Probe, Proof
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
    roles: "Mapping[str, Backend]"
    """Further models, by the names that the algorithm's facts ask for."""
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


class Refit:
    """Hands weights from backend to generator: both ends at once, under a deadline, complete or refused.

    Where a probe is due, the hand-over ends when the generator has shown that it computes with them.
    """

    def __init__(
        self, backend: "Backend", generator: "Generator", link: Link, spans: Spans, after: Callable[[int], None],
        running: "Running" = "drain", probe: "Probe | None" = None,
        places: Callable[[], Places] = tuple,
    ) -> None:  # fmt: skip
        """Take a link that says all but session, version, and the `places` of senders."""
        self._backend, self._generator, self._spans, self._after = backend, generator, spans, after
        self._template, self._running, self._count = link, running, itertools.count()
        self._last: Link | None = None
        self._probe, self._places = probe, places
        self._proof: Proof | None = None
        self._changing = threading.Lock()

    def __call__(self, *, version: int) -> None:
        """Hand over the weights made by step `version`. Raises `RefitError` where the generator does not have them."""
        with ExitStack() as held:
            with self._spans.phase("backend", "refit"):
                held.enter_context(self._changing)
                self._last, self._proof = self._link(version), None
                self._hand_over(self._last)
            if self._probe is not None and self._probe.due(version):
                with self._spans.phase("generator", "probe"):
                    self._proof = self._probe(version)
        self._after(version)

    def again(self, give: "Give") -> None:
        """Give one receiver the weights of the last hand-over; None: there was none yet.

        The senders are not asked, whatever they do meanwhile: what they sent lasts until the next hand-over begins. Nor
        is the trainer: what it scored then is the proof, and where it scored nothing the next hand-over is probed.
        """
        with self._changing:
            if self._probe is not None and self._proof is None:
                self._probe.overdue = True
            give(self._last, self._proof)

    def _hand_over(self, link: Link) -> None:
        ends = [self._backend.send_weights(link), self._generator.receive_weights(link, link.version, self._running)]
        for end in ends:
            end.result()

    def _link(self, version: int) -> Link:
        session = f"{version}-{next(self._count)}"
        return attrs.evolve(self._template, session=session, version=version, places=self._places())


@contextmanager
def closing_all(closers: list[Callable[[], None]]) -> Iterator[list[Callable[[], None]]]:
    """Call what is in the list at the end, last first. The error inside comes through, else the first of a closer."""
    first: BaseException | None = None
    try:
        yield closers
    except BaseException as error:
        first = error
    for close in reversed(closers):
        try:
            close()
        except BaseException as error:  # every other closer must still have its turn
            if first is None or isinstance(first, Exception) > isinstance(error, Exception):  # Ctrl-C meanwhile
                first = error
    if first is not None:
        raise first
