"""Sends the backend's weights to the generator, and checks with a probe that the generator computes with them.

sync(version=n)     after each step: the backend sends, every replica receives, the probe compares when it is due
sync.resync(give)   between two of them: one replica that came back receives the weights of the last sync again
"""

import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from whet.component import GeneratorFacts
from whet.data.spans import Spans
from whet.errors import PluginError, WorkerError, WorkerLost
from whet.installed import entry_points
from whet.interfaces.generator import Replicated
from whet.interfaces.weights import STREAMED, TransferSpec, TransportDriver
from whet.plugins.features import PROBE

if TYPE_CHECKING:
    from whet.config.sections import ClusterSection, ProbeSection
    from whet.data.model_info import ModelInfo
    from whet.interfaces.backend import Backend
    from whet.interfaces.chat import Tokenizer
    from whet.interfaces.generator import Generator, OnWeightUpdate
    from whet.interfaces.weights import Probe, Proof
    from whet.interfaces.workers import Give
    from whet.plan.placement import Way
    from whet.plan.roles import Roles
    from whet.runtime.launcher import Cluster


class WeightSync:
    """Owns every weight sync of one attempt of a run.

    Both ends work at the same time, under a deadline. The generator takes all weights or refuses them. If a probe is
    due, a sync ends after the generator has passed it.
    """

    def __init__(
        self, spec: TransferSpec, spans: Spans, on_weight_update: "OnWeightUpdate" = "drain",
        carry: Callable[[TransferSpec], None] = lambda spec: None,
        loss: Callable[[str, str], WorkerError | None] = lambda role, phase: None,
    ) -> None:  # fmt: skip
        """Take a spec without session and version, which each sync sets.

        `carry` copies the weights to the other nodes that have receivers, after the senders are done. `loss` returns
        the error of a role that lost a process in a phase. If a sender dies, its receiver fails, too, and the error of
        the sender is the one to raise.
        """
        self._template, self._spans, self._on_weight_update, self._carry = spec, spans, on_weight_update, carry
        self._loss = loss
        self._count = itertools.count()
        self._last: TransferSpec | None = None
        self._probe: Probe | None = None
        self._proof: Proof | None = None
        self._changing = threading.Lock()

    def connect(
        self, backend: "Backend", generator: "Generator", *, before: Callable[[], None] = lambda: None,
        after: Sequence[Callable[[int], None]] = (), probe: "Probe | None" = None,
    ) -> None:  # fmt: skip
        """Take both ends, once they are started.

        `before` is called before each sync, and a resync does not wait for it. The functions of `after` are called with
        each version that was sent.
        """
        self._backend, self._generator, self._before, self._after = backend, generator, before, after
        self._probe = probe

    def __call__(self, *, version: int) -> None:
        """Send the weights of step `version` to the generator. Raises `WeightSyncError` if it does not have them."""
        self._before()
        if self._probe is not None and self._probe.trial:
            self._send(version, "trial")
            self._before()
        self._send(version, "policy")
        for call in self._after:
            call(version)

    def _send(self, version: int, weights: str) -> None:
        with ExitStack() as held:
            with self._spans.phase("backend", "weight_sync"):
                held.enter_context(self._changing)
                session = f"{version}-{next(self._count)}"
                spec = attrs.evolve(
                    self._template, session=session, version=version, weights=weights, receivers=self._receivers()
                )
                self._last, self._proof = spec, None
                ends = [
                    self._backend.send_weights(spec),
                    self._generator.receive_weights(spec, version, self._on_weight_update),
                ]
                ends[0].result()
                self._carry(spec)
                try:
                    ends[1].result()
                except WorkerError as error:
                    if isinstance(error, WorkerLost) or (death := self._loss("backend", "weight_sync")) is None:
                        raise
                    raise death from error
            if self._probe is not None and (weights == "trial" or self._probe.due(version)):
                with self._spans.phase("generator", "probe"):
                    self._proof = self._probe(version, weights)

    def _receivers(self) -> int:
        """Return how many receivers a sender waits for: by `broadcast`, those of the replicas that are present."""
        if self._template.transport != "broadcast" or not isinstance(self._generator, Replicated):
            return self._template.receivers
        present, replicas = self._generator.present()
        return self._template.receivers * present // replicas

    def resync(self, give: "Give") -> None:
        """Send the weights of the last sync to one receiver again: call `give` with its transfer and its proof.

        The transfer is None if there was no sync yet. The senders take no part: what they sent remains available until
        the next sync begins. The trainer takes no part either: the proof holds its scores from that time. If there is
        no proof, the next sync is probed.
        """
        with self._changing:
            if self._probe is not None and self._proof is None:
                self._probe.overdue = True
            if self._last is not None:
                self._carry(self._last)  # the receiver's node may not have the weights yet
            give(self._last, self._proof)


def make_weight_sync(
    way: "Way", folder: Path, *, section: "ClusterSection", cluster: "Cluster | None", spans: Spans,
    closers: list[Callable[[], None]], on_weight_update: "OnWeightUpdate" = "drain",
) -> WeightSync:  # fmt: skip
    """Return the weight sync of one attempt, whose ends are not connected yet. Files are written to `folder`."""
    points = {point.name: point for point in entry_points("whet.transports")}
    if way.transport not in points:
        found = ", ".join(sorted(points)) or "none"
        raise PluginError(f"no installed distribution has a driver's part of the transport {way.transport!r}: {found}")
    recovery, drain = section.recovery, section.deadlines.generate if on_weight_update == "drain" else 0.0
    kept = recovery.enabled and recovery.replicas > 0
    # Without a copy, the senders of a stream and the receivers that are ready wait for those that finish requests.
    waiting = drain if way.transport in STREAMED and not kept else 0.0
    spec = TransferSpec(
        way.transport, str(folder.resolve()), "", 0, senders=way.senders, receivers=way.receivers,
        timeout_seconds=section.deadlines.weight_sync + waiting, kept=kept, drain_seconds=drain, adapter=way.adapter,
    )  # fmt: skip
    address = cluster.launcher.address if cluster else lambda: "127.0.0.1"
    copy_memory = cluster.copy_memory if cluster else lambda *order: {}
    driver: TransportDriver = points[way.transport].load()(spec, address, copy_memory)
    closers.append(driver.close)
    loss = cluster.loss if cluster else lambda role, phase: None
    return WeightSync(driver.spec, spans, on_weight_update, driver.carry, loss)


def make_probe(
    section: "ProbeSection", seed: int, temperature: float, max_context: int, roles: "Roles", model: "ModelInfo",
    trainer: "Backend", generator: "Generator", chat: "Tokenizer", run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> "Probe | None":  # fmt: skip
    """Return the probe of a run, or None without one. `run` runs a coroutine at the turn of the generator."""
    if not section.every or "logprobs" not in roles.backend.outputs_given:
        return None
    tokens, dtype = chat.plain_tokens, roles.of(GeneratorFacts)["generator"].dtype
    probe: Probe = PROBE.load()(
        section, seed, chat.opening, tokens[tokens < (model.vocab_size or np.inf)], room=max_context,
        temperature=temperature, dtypes=(dtype or model.dtype, model.dtype), replicas=roles["generator"].ranks,
        generator=generator, run=run, trial="trial" in roles.backend.weights_given,
        score=lambda batch, weights: trainer.score(batch, ("logprobs",), weights)["logprobs"],
    )  # fmt: skip
    return probe
