"""Roles that share memory take turns: nothing is asked of one that sleeps, and nobody holds memory out of turn."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.component import Spec
from whet.data.records import Request, Sampling
from whet.data.spans import Spans
from whet.errors import WhetError
from whet.interfaces.weights import TransferSpec
from whet.rollout.event_loop import EpisodeLoop
from whet.run.colocation import Turns
from whet.run.handles import BackendHandle, GeneratorHandle
from whet_testing.batches import random_batch
from whet_testing.fakes import FakeBackend, FakeGenerator

SIDES = (("backend", "critic"), ("generator", "judge"))
LINK = TransferSpec("disk", "somewhere", "1-0", 1)


class Parts:
    """Fakes that refuse work while they sleep, and note in one list who sleeps and wakes."""

    def __init__(self, sides: Any = SIDES, lends: bool = False) -> None:
        self.notes: list[str] = []
        self.loop, self.spans = EpisodeLoop(), Spans()
        self.turns = Turns(sides, self.spans, self.loop)
        self.raw: dict[str, Any] = {name: self.noted(name, FakeBackend()) for name in ("backend", "critic", "judge")}
        self.raw["generator"] = self.noted("generator", FakeGenerator("yes", delay_seconds=0.05))
        for role, handle in self.raw.items():
            self.turns.join(role, handle, lends=lends and role == "backend")
        self.backend, self.critic, self.judge = (
            BackendHandle(self.raw[name], *self.turns.around(name)) for name in ("backend", "critic", "judge")
        )
        self.generator = GeneratorHandle(
            self.raw["generator"], *self.turns.requests(), receiving=lambda: self.turns.took_weights("generator")
        )

    def noted(self, role: str, handle: Any) -> Any:
        sleep, wake = handle.sleep, handle.wake

        def noted_sleep() -> int:
            sleep()
            self.notes.append(f"{role} sleeps")
            return 3 << 20

        def noted_wake() -> None:
            wake()
            self.notes.append(f"{role} wakes")

        handle.sleep, handle.wake = noted_sleep, noted_wake
        return handle

    def told(self) -> list[str]:
        notes, self.notes[:] = self.notes[:], []
        return notes

    def request(self, name: str = "1") -> Any:
        return self.generator.generate(Request(name, np.arange(3), Sampling(4), 0))

    @property
    def asleep(self) -> set[str]:
        return {role for role, handle in self.raw.items() if handle.asleep}


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.loop.close()


def test_who_has_been_started_sleeps_until_its_turn(parts: Parts) -> None:
    assert parts.asleep == {"backend", "critic", "judge", "generator"}


def test_a_backend_that_lends_its_weights_is_awake_until_the_others_have_their_turn() -> None:
    parts = Parts(lends=True)
    try:
        assert parts.asleep == {"critic", "judge", "generator"}
        parts.told()
        parts.turns.generation()
        assert parts.told() == ["backend sleeps", "generator wakes", "judge wakes"]
    finally:
        parts.loop.close()


def test_each_side_gives_its_memory_back_before_the_other_takes_it(parts: Parts) -> None:
    parts.told()
    batch = random_batch(0)
    parts.backend.train(batch, Spec(""))
    assert parts.told() == ["backend wakes", "critic wakes"]
    parts.critic.score(batch, ("values",))
    assert parts.told() == [], "they have their turn together"
    parts.turns.generation()
    assert parts.told() == ["backend sleeps", "critic sleeps", "generator wakes", "judge wakes"]
    parts.loop.run(parts.request())
    parts.judge.score(batch, ("values",))
    assert parts.told() == []
    parts.backend.score(batch, ("logprobs",))
    assert parts.told() == ["generator sleeps", "judge sleeps", "backend wakes", "critic wakes"]


def test_saving_loading_and_exporting_are_of_the_backends_turn(parts: Parts, tmp_path: Path) -> None:
    for work in (parts.backend.save, parts.backend.load, parts.backend.export):
        parts.turns.generation()
        work(tmp_path / "folder")
        assert parts.asleep == {"generator", "judge"}


def test_weights_are_handed_over_to_a_generator_that_sleeps_and_wakes_at_its_turn(parts: Parts) -> None:
    parts.turns.generation()
    parts.backend.send_weights(LINK)
    parts.generator.receive_weights(LINK, 1)
    assert parts.asleep == {"critic", "generator", "judge"}, "of training only the sender is awake"
    parts.told()
    parts.turns.generation()
    assert parts.told() == ["backend sleeps", "generator wakes", "judge wakes"]


def test_a_weight_sync_begins_with_the_sender_alone_awake_and_without_it_where_it_takes_no_turns() -> None:
    for sides, awake in ((SIDES, {"backend"}), ((("critic",), ("generator", "judge")), {"backend"})):
        parts = Parts(sides)
        try:
            parts.critic.train(random_batch(0), Spec(""))
            parts.turns.syncing()
            assert parts.asleep == {"backend", "critic", "generator", "judge"} - awake
            assert "critic wakes" in parts.told()
            parts.critic.train(random_batch(0), Spec(""))
            assert parts.told() == ["critic wakes"]
        finally:
            parts.loop.close()


def test_what_new_weights_took_is_given_back_where_training_goes_on(parts: Parts) -> None:
    parts.backend.send_weights(LINK)
    parts.generator.receive_weights(LINK, 1)
    parts.told()
    parts.backend.train(random_batch(0), Spec(""))
    assert parts.told() == ["generator sleeps", "critic wakes"]
    parts.backend.train(random_batch(0), Spec(""))
    assert parts.told() == []


def test_a_request_out_of_turn_waits_and_one_under_way_is_answered_first(parts: Parts) -> None:
    parts.turns.generation()
    under_way = asyncio.run_coroutine_threadsafe(parts.request("1"), parts.loop.events)
    parts.loop.run(asyncio.sleep(0.01))
    parts.backend.train(random_batch(0), Spec(""))
    assert under_way.result(5.0).id == "1", "the generator refuses what comes while it sleeps"
    late = asyncio.run_coroutine_threadsafe(parts.request("2"), parts.loop.events)
    with pytest.raises(TimeoutError):
        late.result(0.2)
    parts.turns.generation()
    assert late.result(5.0).id == "2"


def test_a_probe_has_the_generator_for_itself(parts: Parts) -> None:
    parts.backend.train(random_batch(0), Spec(""))
    parts.turns.probing()
    assert parts.asleep == {"backend", "critic"}
    late = asyncio.run_coroutine_threadsafe(parts.request(), parts.loop.events)
    with pytest.raises(TimeoutError):
        late.result(0.2)
    parts.turns.generation()
    assert late.result(5.0).id == "1"


def test_a_judge_that_is_asked_out_of_turn_waits(parts: Parts) -> None:
    parts.turns.training()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(parts.judge.score(random_batch(0), ("values",))))
    asking.start()
    asking.join(0.2)
    assert not answers
    parts.turns.generation()
    asking.join(5.0)
    assert answers


def test_a_judge_that_the_run_itself_asks_has_its_turn_at_once(parts: Parts) -> None:
    parts.turns.training()
    parts.judge.score(random_batch(0), ("values",))
    assert parts.asleep == {"backend", "critic"}


def test_a_turn_ends_when_a_judge_has_answered(parts: Parts) -> None:
    parts.turns.generation()
    began, go_on = threading.Event(), threading.Event()
    parts.raw["judge"]._score = lambda output, batch: (began.set(), go_on.wait(5.0), np.zeros(batch.tokens))[2]
    asking = threading.Thread(target=lambda: parts.judge.score(random_batch(0), ("values",)))
    asking.start()
    assert began.wait(5.0)
    ending = threading.Thread(target=parts.turns.training)
    ending.start()
    ending.join(0.2)
    assert "judge" not in parts.asleep
    go_on.set()
    for thread in (asking, ending):
        thread.join(5.0)
    assert parts.asleep == {"judge", "generator"}


def test_when_the_run_ends_nobody_waits_for_a_turn_any_more(parts: Parts) -> None:
    parts.turns.training()
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(WhetError) as caught:
            parts.judge.score(random_batch(0), ("values",))
        said.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.1)
    parts.turns.close()
    asking.join(5.0)
    assert said == ["the run ended before the turn of the requested model"]


def test_what_was_given_back_and_how_long_it_took_is_told_once(parts: Parts) -> None:
    parts.turns.training()
    assert {name: metric.number() for name, metric in parts.turns.metrics().items()} == {
        "given_back_mib/backend": 3, "given_back_mib/critic": 3, "given_back_mib/generator": 3,
        "given_back_mib/judge": 3,
    }  # fmt: skip
    assert parts.turns.metrics() == {}
    told = {(span.role, span.phase) for span in parts.spans.drain()}
    assert {("generator", "sleep"), ("backend", "wake"), ("generator", "drain")} <= told


def test_where_nobody_takes_turns_nobody_sleeps_and_no_call_waits() -> None:
    parts = Parts(sides=())
    try:
        assert parts.turns.around("backend") == ()
        assert parts.turns.requests() == ()
        parts.turns.training()
        parts.turns.generation()
        assert parts.notes == []
        assert parts.turns.metrics() == {}
    finally:
        parts.loop.close()
