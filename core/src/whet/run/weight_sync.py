"""Sends the backend's weights to the generator, and checks with a probe that the generator computes with them."""

import itertools
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from whet.data.spans import Spans
from whet.interfaces.weights import Places, TransferSpec
from whet.weights.probe import Probe

if TYPE_CHECKING:
    from whet.data.chat import ChatTokenizer
    from whet.interfaces.backend import Backend
    from whet.interfaces.generator import Generator, OnWeightUpdate
    from whet.interfaces.workers import Give
    from whet.plan.prepare import Prepared
    from whet.runtime.event_loop import EpisodeLoop
    from whet.weights.probe import Proof


class WeightSync:
    """Sends weights from the backend to the generator: both work at the same time, under a deadline.

    The generator takes all weights or refuses them. If a probe is due, the call ends after the generator has passed it.
    """

    def __init__(
        self, backend: "Backend", generator: "Generator", spec: TransferSpec, spans: Spans,
        after: Callable[[int], None], on_weight_update: "OnWeightUpdate" = "drain", probe: "Probe | None" = None,
        places: Callable[[], Places] = tuple,
    ) -> None:  # fmt: skip
        """Take a spec without session, version and `places`, which each weight sync sets.

        `places` returns the last known places of senders. `after` is called with each version that was sent.
        """
        self._backend, self._generator, self._spans, self._after = backend, generator, spans, after
        self._template, self._on_weight_update, self._count = spec, on_weight_update, itertools.count()
        self._last: TransferSpec | None = None
        self._probe, self._places = probe, places
        self._proof: Proof | None = None
        self._changing = threading.Lock()

    def __call__(self, *, version: int) -> None:
        """Send the weights of step `version` to the generator. Raises `WeightSyncError` if it does not have them."""
        with ExitStack() as held:
            with self._spans.phase("backend", "weight_sync"):
                held.enter_context(self._changing)
                self._last, self._proof = self._spec(version), None
                self._sync(self._last)
            if self._probe is not None and self._probe.due(version):
                with self._spans.phase("generator", "probe"):
                    self._proof = self._probe(version)
        self._after(version)

    def resync(self, give: "Give") -> None:
        """Send the weights of the last sync to one receiver again: call `give` with its transfer and its proof.

        The transfer is None if there was no sync yet. The senders take no part: what they sent remains available until
        the next sync begins. The trainer takes no part either: the proof holds its scores from that time. If there is
        no proof, the next sync is probed.
        """
        with self._changing:
            if self._probe is not None and self._proof is None:
                self._probe.overdue = True
            give(self._last, self._proof)

    def _sync(self, spec: TransferSpec) -> None:
        ends = [
            self._backend.send_weights(spec),
            self._generator.receive_weights(spec, spec.version, self._on_weight_update),
        ]
        for end in ends:
            end.result()

    def _spec(self, version: int) -> TransferSpec:
        session = f"{version}-{next(self._count)}"
        return attrs.evolve(self._template, session=session, version=version, places=self._places())


def make_probe(
    prepared: "Prepared", trainer: "Backend", generator: "Generator | None", chat: "ChatTokenizer",
    loop: "Callable[[], EpisodeLoop]", turn: Callable[[], None] = lambda: None,
) -> "Probe | None":  # fmt: skip
    """Return the probe of a run; None: it is switched off, or there is nothing to compare.

    `turn` waits until the generator has its turn.
    """
    config, model, facts = prepared.config, prepared.model, prepared.facts
    given = "logprobs" in facts["backend"].outputs_given
    if generator is None or not config.weight_sync.probe.every or not given:
        return None
    tokens = chat.plain_tokens

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        turn()
        return loop().run(coroutine)

    return Probe(
        config.weight_sync.probe, config.run.seed, chat.opening, tokens[tokens < (model.vocab_size or np.inf)],
        room=prepared.plan.max_context, temperature=config.rollout.temperature,
        dtypes=(facts["generator"].dtype or model.dtype, model.dtype), replicas=prepared.plan.role("generator").ranks,
        generator=generator, score=lambda batch: trainer.score(batch, ("logprobs",))["logprobs"],
        run=run,
    )  # fmt: skip
