"""Weights go from backend to generator as the config says, and busy times are recorded."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whet.config.cluster import ClusterSection, RecoverySection
from whet.data.records import Request, Sampling
from whet.data.spans import Spans
from whet.errors import PluginError, WorkerError, WorkerLost
from whet.interfaces.generator import OnWeightUpdate
from whet.interfaces.weights import TransferSpec
from whet.plan.placement import Way
from whet.rollout.event_loop import EpisodeLoop
from whet.run.handles import BackendHandle, GeneratorHandle, busy, timed
from whet.run.run_folder import closing_all
from whet.run.weight_sync import WeightSync, make_weight_sync
from whet_testing.fakes import Done, FakeBackend, FakeGenerator


class Noting(FakeGenerator):
    """Remembers what it was told about requests under way."""

    def __init__(self) -> None:
        super().__init__("a", delay_seconds=0.02)
        self.told: list[tuple[int, OnWeightUpdate]] = []

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        self.told.append((version, on_weight_update))
        return super().receive_weights(spec, version, on_weight_update)


class Forsaken(FakeGenerator, Done):
    """Fails as a receiver does whose sender is gone."""

    def receive_weights(self, spec: TransferSpec, version: int, on_weight_update: OnWeightUpdate = "drain") -> Done:
        return self

    def result(self) -> Any:
        raise WorkerError("generator", 0, "weight_sync", "its sender is gone")


def weight_sync(generator: Any, backend: BackendHandle, spans: Spans, **options: Any) -> WeightSync:
    ends = {name: options.pop(name) for name in ("after", "probe") if name in options}
    sync = WeightSync(TransferSpec("disk", "nowhere", "", 0), spans, **options)
    sync.connect(backend, generator, **ends)
    return sync


@pytest.mark.parametrize(
    ("transport", "on_weight_update", "replicas", "seconds"),
    [
        ("disk", "drain", 8, (600.0, 1800.0)),
        ("disk", "drain", 0, (600.0, 1800.0)),
        ("broadcast", "drain", 8, (600.0, 1800.0)),
        ("broadcast", "drain", 0, (2400.0, 1800.0)),
        ("broadcast", "abort", 0, (600.0, 0.0)),
    ],
)
def test_a_weight_sync_waits_for_running_requests_where_they_finish_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str, on_weight_update: Any, replicas: int,
    seconds: tuple[float, float],
) -> None:  # fmt: skip
    specs = list[TransferSpec]()

    def driver(spec: TransferSpec, *_: Any) -> Any:
        specs.append(spec)
        return SimpleNamespace(spec=spec, carry=None, close=None)

    point = SimpleNamespace(name=transport, load=lambda: driver)
    monkeypatch.setattr("whet.run.weight_sync.entry_points", lambda group: [point])
    section = ClusterSection(recovery=RecoverySection(replicas=replicas))
    make_weight_sync(
        Way(transport, ""), tmp_path, section=section, cluster=None, spans=Spans(), closers=[],
        on_weight_update=on_weight_update,
    )  # fmt: skip
    assert [(spec.timeout_seconds, spec.drain_seconds) for spec in specs] == [seconds]


class OfReplicas(FakeGenerator):
    """Has three replicas, one of which is away."""

    def present(self) -> tuple[int, int]:
        return 2, 3


@pytest.mark.parametrize(
    ("generator", "transport", "receivers"),
    [(OfReplicas, "broadcast", 4), (FakeGenerator, "broadcast", 6), (OfReplicas, "shared", 6)],
)
def test_a_broadcast_waits_for_the_replicas_that_are_present(
    generator: type[FakeGenerator], transport: str, receivers: int
) -> None:
    spans, backend = Spans(), FakeBackend()
    sync = WeightSync(TransferSpec(transport, "nowhere", "", 0, receivers=6), spans)
    sync.connect(BackendHandle(backend, timed(spans)), GeneratorHandle(generator("a"), busy(spans)))
    sync(version=1)
    assert [spec.receivers for spec in backend.sent] == [receivers]


@pytest.mark.parametrize("loss", [WorkerLost("backend", 0, "weight_sync", "its process was killed"), None])
def test_a_receiver_whose_sender_has_died_is_not_the_one_to_blame(loss: WorkerLost | None) -> None:
    spans, asked = Spans(), list[tuple[str, ...]]()

    def find(*what: str) -> WorkerLost | None:
        asked.append(what)
        return loss

    backend = BackendHandle(FakeBackend(), timed(spans))
    sync = weight_sync(GeneratorHandle(Forsaken("a"), busy(spans)), backend, spans, loss=find)
    with pytest.raises(WorkerError) as raised:
        sync(version=1)
    assert asked == [("backend", "weight_sync")]
    assert (raised.value.role, isinstance(raised.value, WorkerLost)) == (
        ("backend", True) if loss else ("generator", False)
    )


def test_a_weight_sync_says_what_requests_under_way_are_to_do() -> None:
    generator, spans, versions = Noting(), Spans(), list[int]()
    backend = FakeBackend()
    sync = weight_sync(
        GeneratorHandle(generator, busy(spans)),
        BackendHandle(backend, timed(spans)),
        spans,
        after=[versions.append],
        on_weight_update="continue",
    )
    sync(version=3)
    sync(version=4)
    assert generator.told == [(3, "continue"), (4, "continue")]
    assert versions == [spec.version for spec in backend.sent] == [3, 4]
    assert len({spec.session for spec in backend.sent}) == 2
    assert [span.phase for span in spans.drain()] == ["weight_sync", "weight_sync"]


def test_what_was_sent_is_carried_to_other_nodes_and_again_for_a_receiver_that_came_back() -> None:
    spans, backend, carried = Spans(), FakeBackend(), list[Any]()
    generator = GeneratorHandle(Noting(), busy(spans))
    sync = weight_sync(generator, BackendHandle(backend, timed(spans)), spans, carry=carried.append)
    sync(version=1)
    assert carried == backend.sent
    sync.resync(lambda spec, proof: carried.append(spec))
    assert carried == backend.sent * 3


def test_a_generator_is_busy_from_the_first_request_to_the_last_answer_whatever_steps_end_meanwhile() -> None:
    spans = Spans()
    generator = GeneratorHandle(FakeGenerator("a", delay_seconds=0.05), busy(spans))

    async def ask(id_: str, after: float) -> None:
        await asyncio.sleep(after)
        await generator.generate(Request(id_, np.arange(3), Sampling(4), 0))

    async def scene() -> list[Any]:
        busy = asyncio.gather(ask("a", 0), ask("b", 0.03), ask("c", 0.06))
        await asyncio.sleep(0.045)
        first = spans.drain()
        await busy
        second = spans.drain()
        await asyncio.sleep(0.01)
        idle = spans.drain()
        await ask("d", 0)
        return [first, second, idle, spans.drain()]

    first, second, idle, third = asyncio.run(scene())
    assert [len(found) for found in (first, second, idle, third)] == [1, 1, 0, 1]
    assert first[0].seconds > 0.03
    assert first[0].seconds + second[0].seconds > 0.1
    assert third[0].seconds > 0.04


def test_an_error_inside_is_not_hidden_by_what_fails_to_close_after_it() -> None:
    def failing() -> None:
        raise ValueError("a closer")

    closed: list[int] = []
    with pytest.raises(ValueError, match="a closer"), closing_all([lambda: closed.append(1), failing]):
        pass
    with pytest.raises(WorkerLost) as caught, closing_all([lambda: closed.append(2), failing]):
        raise WorkerLost("backend", 0, "train", "killed by signal 9")
    assert closed == [1, 2]
    assert caught.value.role == "backend"

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing_all([interrupted]):
        raise WorkerLost("backend", 0, "train", "killed by signal 9")


@pytest.mark.parametrize("direct", [False, True])
def test_a_token_that_the_model_does_not_have_is_refused_with_the_name_of_its_generator(direct):
    request = Request("r", np.array([1]), Sampling(max_tokens=4), 0)
    for vocabulary in (0, 257, ord("a")):
        handle = GeneratorHandle(FakeGenerator("a"), busy(Spans()), vocabulary=vocabulary, name="tokens")
        coroutine = (handle.direct() if direct else handle).generate(request)
        if vocabulary != ord("a"):
            asyncio.run(coroutine)
            continue
        with pytest.raises(PluginError, match=r"'tokens' gave the token \d+ for request r; the model has .* 0 to 96"):
            asyncio.run(coroutine)


def test_requests_of_any_thread_are_made_on_the_loop_of_the_handle():
    loop, spans, loops = EpisodeLoop(), Spans(), []

    class Noting(FakeGenerator):
        async def generate(self, request):
            loops.append(asyncio.get_running_loop())
            return await super().generate(request)

    handle = GeneratorHandle(Noting("a"), busy(spans), loop=loop.events)
    request = Request("r", np.array([1]), Sampling(max_tokens=4), 0)
    try:
        for completion in (asyncio.run(handle.generate(request)), loop.run(handle.generate(request))):
            assert completion.tokens[0] == ord("a")
    finally:
        loop.close()
    assert loops == [loop.events] * 2
