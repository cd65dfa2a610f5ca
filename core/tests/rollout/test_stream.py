import asyncio
import gc
import json
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config.sections import RolloutSection
from whet.data.batch import Batch
from whet.data.records import Completion, Group, Request, Task
from whet.errors import CheckpointError, DataError, PluginError, WhetError, WorkerError
from whet.interfaces.environment import Model, SingleTurn
from whet.rollout.event_loop import EpisodeLoop
from whet.rollout.routing import Route
from whet.rollout.stream import RolloutStream
from whet_testing.contracts.workers import wait_until
from whet_testing.fakes import ByteChat, FakeGenerator

GROUP_SIZE = 3


class Jittery(FakeGenerator):
    """Answers with random letters after random delays."""

    def __init__(self, jitter: int = 0, longest: float = 0.002) -> None:
        super().__init__(lambda prompt, rng: "".join(rng.choice(list("abcd"), rng.integers(1, 6))))
        self._random = random.Random(jitter)
        self.longest = longest

    async def generate(self, request: Request) -> Completion:
        self._delay = self._random.uniform(0, self.longest)
        return await super().generate(request)

    @property
    def groups(self) -> list[int]:
        """Groups that were asked for, a request each."""
        return [int(request.id.split("-")[1]) for request in self.requests]


def correct(text: str, data: Mapping[str, Any]) -> float:
    return float(text.startswith("a"))


def environment(tasks: int = 50) -> SingleTurn:
    return SingleTurn({"train": [Task(f"q{i}", {"i": i}) for i in range(tasks)]}, {"correct": correct})


@contextmanager
def stream(generator: Any = None, routes: Any = None, **changes: Any) -> Iterator[RolloutStream]:
    names = {"group_size", "seed", "filters", "deadline_seconds", "status", "loop", "greedy", "journal"}
    options = {name: changes.pop(name) for name in names & set(changes)}
    section = RolloutSection(**{"max_tokens": 8, "retries": 0, **changes})
    routes = routes or [Route("letters", environment(), "train")]
    options = {"group_size": GROUP_SIZE, "seed": 0, **options}
    made = RolloutStream(routes, generator or Jittery(), ByteChat(), section, **options)
    try:
        yield made
    finally:
        made.close()


def drive(made: RolloutStream, generator: FakeGenerator, steps: int, size: int, first: int = 0) -> list[Batch]:
    """Take, train a moment, sync: the driver's part."""
    batches = []
    for step in range(first + 1, first + steps + 1):
        batches.append(made.take(size))
        time.sleep(0.001)
        generator.version = step
        made.set_version(step)
    return batches


def same(one: Batch, other: Batch) -> bool:
    return one.columns == other.columns and all(
        np.array_equal(one[name], other[name], equal_nan=True) for name in one.columns
    )


def some_dropped(group: Group) -> bool:
    return group.index % 3 != 1


class Unlucky(SingleTurn):
    """Fails on every fifth group for good."""

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        rewards = await super().run(task, model)
        if model._assignment.index % 5 == 2:  # type: ignore[attr-defined]
            raise RuntimeError("no luck")
        return rewards


@settings(max_examples=24)
@given(
    order=st.sampled_from(["fifo", "as_completed"]),
    staleness=st.sampled_from([0, 1, 2, 3]),
    size=st.integers(1, 4),
    jitter=st.integers(0, 1000),
    filtered=st.booleans(),
    unlucky=st.booleans(),
)
def test_every_group_ends_once_and_no_sequence_is_too_old(
    order: str, staleness: int, size: int, jitter: int, filtered: bool, unlucky: bool
) -> None:
    keep = some_dropped if filtered else lambda group: True
    made_of = Unlucky if unlucky else SingleTurn
    letters = made_of({"train": [Task(f"q{i}", {"i": i}) for i in range(50)]}, {"correct": correct})
    trained, filtered_out, dropped = list[int](), list[int](), list[int]()
    generator = Jittery(jitter)
    told = list[dict[str, Any]]()
    options: dict[str, Any] = {"max_staleness": staleness, "order": order, "filters": [keep]}
    options["journal"] = lambda event, **details: told.append({"event": event, **details})
    with stream(generator, [Route("letters", letters, "train")], **options) as made:
        for step in range(1, 9):
            batch, consumed, metrics = made.take(size), made.collect(), made.metrics()
            groups = [group.index for group in consumed.trained]
            assert list(dict.fromkeys(batch["group"].tolist())) == groups == sorted(groups)
            assert len(groups) == size
            if order == "fifo" and trained:
                assert groups[0] > trained[-1]
            trained += groups
            filtered_out += consumed.filtered
            dropped += consumed.dropped
            ages = step - 1 - batch["version"][batch["loss_mask"]]
            assert 0 <= ages.min() <= ages.max() <= staleness
            assert metrics["staleness/max"].number() == ages.max()
            assert metrics["groups/filtered"].number() == len(consumed.filtered)
            assert metrics["groups/dropped"].number() == len(consumed.dropped)
            state = made.state()
            ended = sorted(trained + filtered_out + dropped)
            assert ended == [*range(state["groups"]["letters"]), *state["beyond"]]
            time.sleep(0.001)
            generator.version = step
            made.set_version(step)
        asked = set(generator.groups)
    assert asked == set(range(max(asked) + 1))
    assert {index % 5 for index in dropped} <= ({2} if unlucky else set())
    assert set(dropped) <= {row["group"] for row in told}
    assert all((row["event"], row["environment"]) == ("group dropped", "letters") and row["cause"] for row in told)
    assert {index % 3 for index in filtered_out} <= ({1} if filtered else set())
    assert not any((filtered and i % 3 == 1) or (unlucky and i % 5 == 2) for i in trained)
    kept = [i for i in asked - set(trained) if not (filtered and i % 3 == 1) and not (unlucky and i % 5 == 2)]
    assert len(kept) <= staleness * size, "more is prepared than the bound allows"
    assert len(generator.requests) == len({request.id for request in generator.requests})
    assert not generator.cancelled or staleness or unlucky


class OneSlow(Jittery):
    """The fourth group takes as long as it is let."""

    def __init__(self) -> None:
        super().__init__(longest=0)
        self.let = threading.Event()

    async def generate(self, request: Request) -> Completion:
        if request.id.split("-")[1] == "3":
            await asyncio.to_thread(self.let.wait, 30)
        return await super().generate(request)


def test_in_order_of_completion_a_slow_group_is_overtaken_until_it_is_due() -> None:
    generator = OneSlow()
    with stream(generator, max_staleness=2, order="as_completed") as made:
        taken = [sorted(set(batch["group"].tolist())) for batch in drive(made, generator, 2, 2)]
        assert 3 not in [*taken[0], *taken[1]]
        state = made.state()
        assert state["groups"]["letters"] == 3
        assert state["beyond"] == [i for i in taken[1] if i > 3]
        threading.Timer(0.3, generator.let.set).start()
        begin = time.monotonic()
        last = made.take(2)
        assert time.monotonic() - begin > 0.2, "it was admitted by the first take, so the third has to wait for it"
        assert 3 in last["group"]
        assert made.state()["groups"]["letters"] == 6


@pytest.mark.parametrize("seed", range(3))
def test_what_was_consumed_beyond_a_slow_group_is_not_played_again(seed: int) -> None:
    generator = OneSlow()
    try:
        with stream(generator, two_routes(), max_staleness=2, order="as_completed", filters=[some_dropped]) as made:
            drive(made, generator, 2, 2)
            before, state = made.collect(), made.state()
    finally:
        generator.let.set()
    ended = {*(group.index for group in before.trained), *before.filtered}
    assert 3 not in ended
    assert ended == {*range(sum(state["groups"].values())), *state["beyond"]}
    assert state["beyond"]
    generator = Jittery(seed)
    with stream(generator, two_routes(), max_staleness=2, order="as_completed", filters=[some_dropped]) as made:
        made.restore(json.loads(json.dumps(state)))
        assert made.state() == state
        made.take(2)
        after = made.collect()
        assert not ended & {*(group.index for group in after.trained), *after.filtered}
        assert min(generator.groups) == 3
        assert not ended & set(generator.groups)
        again = {group.index: (group.environment, group.task) for group in after.trained}
    with stream(Jittery(), two_routes(), filters=[some_dropped]) as whole:
        whole.take(max(again) + 1)
        expected = {group.index: (group.environment, group.task) for group in whole.collect().trained}
    assert all(expected[index] == played for index, played in again.items())


def test_while_it_is_paused_nothing_of_it_is_under_way() -> None:
    class Counting(Jittery):
        under_way = 0

        async def generate(self, request: Request) -> Completion:
            self.under_way += 1
            try:
                return await super().generate(request)
            finally:
                self.under_way -= 1

    generator = Counting(longest=0.05)
    with stream(generator, max_staleness=3) as made:
        made.take(2)
        with made.paused():
            seen = len(generator.requests)
            for _ in range(10):
                time.sleep(0.01)
                assert generator.under_way == 0
            assert len(generator.requests) == seen
        assert len(set(made.take(2)["group"].tolist())) == 2
    with stream(Jittery()) as made, made.paused():
        pass


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_two_takes_to_a_step_keep_the_bound_and_are_counted_together(staleness: int) -> None:
    generator = Jittery(3)
    with stream(generator, max_staleness=staleness) as made:
        for step in range(1, 7):
            for _ in range(2):
                batch = made.take(2)
                assert (step - 1 - batch["version"][batch["loss_mask"]]).max() <= staleness
            consumed = made.collect()
            assert [group.index for group in consumed.trained] == list(range(4 * step - 4, 4 * step))
            lengths = [
                len(t.tokens) - t.prompt_length for g in consumed.trained for e in g.episodes for t in e.trajectories
            ]
            assert made.metrics()["response_length/mean"].number() == pytest.approx(np.mean(lengths))
            generator.version = step
            made.set_version(step)


def test_it_plays_ahead_while_the_trainer_trains() -> None:
    generator = Jittery(longest=0)
    with stream(generator, max_staleness=1) as made:
        made.take(2)
        deadline = time.monotonic() + 5
        while len(generator.requests) < 4 * GROUP_SIZE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(set(generator.groups)) == 4
        time.sleep(0.05)
        assert len(set(generator.groups)) == 4


def test_without_staleness_nothing_plays_between_takes() -> None:
    generator = Jittery(longest=0)
    with stream(generator) as made:
        made.take(2)
        made.set_version(1)
        time.sleep(0.05)
        assert sorted(set(generator.groups)) == [0, 1]


def test_without_staleness_replacements_wait_for_all_others() -> None:
    finished: list[int] = []

    class Waves(Jittery):
        async def generate(self, request: Request) -> Completion:
            group = int(request.id.split("-")[1])
            if group >= 4:  # groups 1 and 4 are filtered
                assert all(finished.count(earlier) == GROUP_SIZE for earlier in range(group))
            made = await super().generate(request)
            finished.append(group)
            return made

    with stream(Waves(longest=0.01), filters=[some_dropped]) as made:
        assert sorted(set(made.take(4)["group"].tolist())) == [0, 2, 3, 5]
        assert made.metrics()["groups/filtered"].number() == 2


@pytest.mark.parametrize("filters", [[], [some_dropped]])
def test_without_staleness_timing_changes_nothing(filters: Any) -> None:
    def run(jitter: int) -> list[Batch]:
        generator = Jittery(jitter)
        with stream(generator, filters=filters) as made:
            return drive(made, generator, 4, 3)

    assert all(same(a, b) for a, b in zip(run(1), run(2), strict=True))


def two_routes() -> list[Route]:
    return [Route("often", environment(7), "train", weight=3.0), Route("rarely", environment(5), "train", weight=1.0)]


def test_a_resumed_stream_goes_on_as_if_nothing_had_happened() -> None:
    def begin(generator: FakeGenerator) -> Any:
        return stream(generator, two_routes(), filters=[some_dropped])

    generator = Jittery(1)
    with begin(generator) as made:
        whole = drive(made, generator, 6, 3)
    generator = Jittery(2)
    with begin(generator) as made:
        before, state = drive(made, generator, 3, 3), made.state()
    assert all(isinstance(number, int) for number in state["groups"].values())
    generator = Jittery(3)
    generator.version = 3
    with begin(generator) as made:
        made.restore(state)
        made.set_version(3)
        after = drive(made, generator, 3, 3, first=3)
    assert all(same(a, b) for a, b in zip(whole, [*before, *after], strict=True))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_stream_keeps_the_environments_of_a_schedule(max_staleness: int) -> None:
    routes = [evolve(two_routes()[0], weight={0: 9.0, 3: 0.0}), two_routes()[1]]

    def begin(generator: FakeGenerator) -> Any:
        return stream(generator, routes, max_staleness=max_staleness)

    def chosen(batches: list[Batch]) -> list[tuple[int, int]]:
        pairs = [pair for one in batches for pair in zip(one["group"], one["env"], strict=True)]
        return sorted({(int(group), int(env)) for group, env in pairs})

    generator = Jittery(1)
    with begin(generator) as made:
        whole = chosen(drive(made, generator, 6, 3))
    generator = Jittery(2)
    with begin(generator) as made:
        before, state = chosen(drive(made, generator, 3, 3)), made.state()
    assert bool(state["shares"]["ahead"]) == bool(max_staleness)
    generator = Jittery(3)
    generator.version = 3
    with begin(generator) as made:
        made.restore(json.loads(json.dumps(state)))
        made.set_version(3)
        after = chosen(drive(made, generator, 3, 3, first=3))
    assert before == whole[:9]
    assert {group for group, _ in after} == set(range(9, 18))
    if not max_staleness:
        assert after == whole[9:]
    else:  # how far groups play ahead of the steps is a matter of time; those ahead keep their environments
        known = state["shares"]["ahead"]
        assert [env for _, env in after][: len(known)] == known


def test_with_staleness_what_was_not_handed_over_is_played_again() -> None:
    generator = Jittery()
    with stream(generator, two_routes(), max_staleness=2) as made:
        first = drive(made, generator, 2, 3)[-1]
        state = made.state()
    assert sum(state["groups"].values()) == max(first["group"]) + 1
    assert state["beyond"] == []
    with stream(Jittery(), two_routes(), max_staleness=2) as made:
        made.restore(state)
        assert sorted(set(made.take(3)["group"].tolist())) == [6, 7, 8]


def test_another_set_of_environments_is_refused() -> None:
    with (
        stream(routes=two_routes()) as made,
        pytest.raises(CheckpointError, match=r"often, other, .* has often, rarely"),
    ):
        made.restore({"groups": {"often": 1, "other": 2}})


def test_environments_get_their_share() -> None:
    with stream(routes=two_routes()) as made:
        batch = made.take(16)
    assert batch.info["environments"] == ("often", "rarely")
    assert batch.info["reward_weights"] == {name: {"correct": 1.0} for name in ("often", "rarely")}
    assert np.bincount(batch["env"][::GROUP_SIZE]).tolist() == [12, 4]


def test_every_task_comes_once_in_each_pass() -> None:
    with stream(routes=[Route("letters", environment(6), "train")]) as made:
        made.take(12)
        tasks = [group.task for group in made.collect().trained]
    assert sorted(tasks[:6]) == sorted(tasks[6:]) == list(range(6))
    assert tasks[:6] != tasks[6:]


def test_rewards_and_lengths_are_metrics_of_the_take_once() -> None:
    with stream() as made:
        batch = made.take(4)
        metrics, again = made.metrics(), made.metrics()
    assert metrics["reward/mean"].number() == pytest.approx(batch["reward"].mean())
    assert metrics["reward/correct"].number() == pytest.approx(batch["reward:correct"].mean())
    lengths = batch["lengths"] - batch["prompt_lengths"]
    assert metrics["response_length/mean"].number() == pytest.approx(lengths.mean())
    assert metrics["response_length/max"].number() == lengths.max()
    assert metrics["groups/dropped"].number() == metrics["episodes/failed"].number() == 0
    assert again == {}


class Failing(SingleTurn):
    """Fails on some tasks, always or on the first attempts."""

    error: type[Exception] = RuntimeError

    def __init__(self, bad: set[int], attempts: int = 1000) -> None:
        super().__init__({"train": [Task(f"q{i}", {"i": i}) for i in range(20)]}, {"correct": correct})
        self._bad, self._attempts = bad, attempts
        self.failures: dict[int, int] = {}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        rewards = await super().run(task, model)
        index = task.data["i"]
        if index in self._bad and self.failures.get(index, 0) < self._attempts:
            self.failures[index] = self.failures.get(index, 0) + 1
            raise self.error("the grader broke")
        return rewards


def test_a_group_that_fails_is_dropped_counted_and_replaced() -> None:
    bad = {3, 8}
    with stream(routes=[Route("fragile", Failing(bad), "train")], retries=1) as made:
        made.take(18)
        tasks = {group.task for group in made.collect().trained}
        metrics = made.metrics()
    assert tasks == set(range(20)) - bad
    assert metrics["groups/dropped"].number() == 2
    assert metrics["episodes/retried"].number() >= 2
    assert metrics["episodes/failed"].number() >= 2


def test_a_group_that_recovers_is_kept() -> None:
    environment = Failing({3}, attempts=1)
    with stream(routes=[Route("fragile", environment, "train")], retries=1) as made:
        made.take(20)
        metrics = made.metrics()
    assert metrics["groups/dropped"].number() == 0
    assert metrics["episodes/retried"].number() == 1


def test_many_failed_groups_in_a_row_end_the_run_with_the_cause() -> None:
    route = Route("fragile", Failing(set(range(20))), "train")
    with (
        stream(routes=[route], retries=1, max_failed_groups=4) as made,
        pytest.raises(WhetError, match=r"4 groups in a row failed; the last: environment 'fragile', task \d+, .*broke"),
    ):
        made.take(2)


def test_an_environment_that_cancels_the_task_of_its_group_ends_the_run() -> None:
    class Cancels(SingleTurn):
        async def run(self, task: Task, model: Model) -> Mapping[str, float]:
            playing = asyncio.current_task()
            assert playing is not None
            playing.cancel()
            await asyncio.sleep(0)
            return {"correct": 1.0}

    cancels = Cancels({"train": [Task("q")]}, {"correct": correct})
    with (
        stream(routes=[Route("letters", cancels, "train")]) as made,
        pytest.raises(WhetError, match="'letters', task 0 cancelled the asyncio task that played its group"),
    ):
        made.take(1)


def test_groups_lost_to_infrastructure_have_a_budget_and_a_counter_of_their_own() -> None:
    class Unreachable(Failing):
        error = ConnectionError

    bad = {3, 8, 11}
    route = Route("fragile", Unreachable(bad), "train")
    with stream(routes=[route], infrastructure_retries=0, max_failed_groups=1) as made:
        made.take(17)
        metrics = made.metrics()
    assert metrics["groups/dropped"].number() == 3
    assert metrics["episodes/infrastructure"].number() >= 3
    assert metrics["episodes/failed"].number() == 0
    route = Route("fragile", Unreachable(set(range(20))), "train")
    with (
        stream(routes=[route], infrastructure_retries=0, max_infrastructure_groups=2) as made,
        pytest.raises(WhetError, match=r"2 groups in a row failed because of their infrastructure; the last: .*broke"),
    ):
        made.take(8)


def test_many_filtered_groups_in_a_row_end_the_run() -> None:
    with (
        stream(filters=[lambda group: False], max_filtered_groups=5) as made,
        pytest.raises(WhetError, match=r"dropped 5 groups in a row, .*\[.*\].* raise rollout.max_filtered_groups"),
    ):
        made.take(2)


def test_a_filter_that_breaks_is_not_taken_for_an_answer() -> None:
    def broken(group: Group) -> bool:
        raise KeyError("threshold")

    with stream(filters=[broken]) as made, pytest.raises(WhetError, match=r"filter failed on task .* KeyError"):
        made.take(1)


@pytest.mark.parametrize("answer", ["no", None, 1])
def test_a_filter_that_returns_no_truth_value_is_named(answer: Any) -> None:
    class NotFlat:
        def __call__(self, group: Group) -> Any:
            return answer

    with stream(filters=[NotFlat()]) as made, pytest.raises(WhetError, match=r"NotFlat` returned .*, wanted True or"):
        made.take(1)


def test_a_filter_with_a_part_of_a_state_is_refused() -> None:
    class Forgetful:
        def __call__(self, group: Group) -> bool:
            return True

        def state(self) -> dict[str, Any]:
            return {}

    words = r"filter 0 \(.*Forgetful\) has the method `state` and no `load`"
    with pytest.raises(PluginError, match=words), stream(filters=[Forgetful()]):
        pass


class Dying(Jittery):
    async def generate(self, request: Request) -> Completion:
        if len(self.requests) >= 7:
            raise WorkerError("generator", 1, "generate", "killed by signal 9")
        return await super().generate(request)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_dead_worker_ends_the_run_at_once(staleness: int) -> None:
    generator = Dying()
    with stream(generator, max_staleness=staleness, retries=5) as made:
        with pytest.raises(WorkerError, match="generator rank 1 failed in generate: killed by signal 9"):
            drive(made, generator, 9, 1)
        with pytest.raises(WorkerError):
            made.take(1)


class Stop(BaseException):
    """What a signal handler raises in the main thread."""


def test_an_interrupt_reaches_the_taker_and_costs_no_group() -> None:
    told: list[str] = []

    def status(text: str) -> None:
        told.append(text)
        if text and len(told) == 1:
            raise Stop

    generator = Jittery(longest=0.5)
    with stream(generator, status=status) as made:
        with pytest.raises(Stop):
            made.take(2)
        assert made.state() == {"groups": {"letters": 0}, "beyond": []}
        batch = made.take(2)
        assert sorted(set(batch["group"].tolist())) == [0, 1]
        assert made.state() == {"groups": {"letters": 2}, "beyond": []}
    assert told[0] in {f"rollouts, {done} of 6 episodes finished" for done in range(7)}
    assert told[-1] == ""


def test_closing_cancels_what_plays() -> None:
    generator = Jittery(longest=0)
    with stream(generator, max_staleness=3) as made:
        made.take(1)
        while set(generator.groups) != {0, 1, 2, 3}:
            time.sleep(0.01)
        generator.longest = 1e6
        made.take(1)
        while 4 not in generator.groups:
            time.sleep(0.01)
        begin = time.monotonic()
        made.close()
        assert time.monotonic() - begin < 10.0
        made.close()
    assert generator.cancelled


def test_a_stream_on_a_loop_of_others_leaves_it_open() -> None:
    loop = EpisodeLoop()
    try:
        with stream(loop=loop, max_staleness=1) as made:
            made.take(1)
        assert loop.call(lambda: "alive") == "alive"
        with pytest.raises(WhetError, match="closed"):
            made.take(1)
    finally:
        loop.close()


@pytest.mark.filterwarnings("error")
def test_a_take_after_the_end_of_the_run_is_one_clear_error() -> None:
    loop = EpisodeLoop()
    with stream(loop=loop) as made:
        made.take(1)
    loop.close()
    with pytest.raises(WhetError, match="the run has ended, so no episode can be played any more"):
        made.take(1)
    gc.collect()


def test_code_that_blocks_everybody_is_named_with_its_line() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        time.sleep(1.0)
        return {"correct": 1.0}

    blocking = environment()
    blocking.run = run  # type: ignore[method-assign]
    loop = EpisodeLoop(stall_seconds=0.3)
    with (
        stream(routes=[Route("slow", blocking, "train")], loop=loop, group_size=1) as made,
        pytest.raises(WhetError, match=r"(?s)without\s+awaiting.*test_stream.py.*time.sleep\(1.0\)"),
    ):
        made.take(1)
    loop.close()


def test_an_episode_that_goes_on_when_it_is_cancelled_is_named_and_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = asyncio.Event()

    async def run(task: Task, model: Model) -> Mapping[str, float]:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return {"correct": 1.0}

    stubborn = environment()
    stubborn.run = run  # type: ignore[method-assign]
    loop = EpisodeLoop(stall_seconds=0.5)
    with (
        stream(routes=[Route("stubborn", stubborn, "train")], loop=loop, group_size=1, deadline_seconds=0.2) as made,
        pytest.raises(
            WhetError, match=r"an episode goes on \d+ seconds behind its time limit .*: .* in run.*must raise it again"
        ),
    ):
        made.take(1)
    loop.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.fullmatch(r"\d tasks go on although they were cancelled: .*1 at test_stream.py:\d+ in run.*", told[0])


def test_takes_of_another_size_are_refused_with_staleness() -> None:
    with stream(max_staleness=1) as made:
        made.take(2)
        with pytest.raises(ValueError, match=r"take\(3\) after take\(2\)"):
            made.take(3)
    with stream() as made:
        assert [len(set(made.take(n)["group"].tolist())) for n in (2, 3, 1)] == [2, 3, 1]


def test_weights_that_change_too_often_between_takes_are_noticed() -> None:
    generator = Jittery(longest=0)
    with stream(generator, max_staleness=1) as made:
        made.take(1)
        time.sleep(0.1)
        made.set_version(2)
        with pytest.raises(WhetError, match="2 versions old when it is taken, wanted at most 1"):
            made.take(1)


def test_environments_that_cannot_give_anything_are_refused() -> None:
    with (
        pytest.raises(DataError, match="'empty' has no tasks in its split 'train'"),
        stream(routes=[Route("empty", SingleTurn({"train": []}, {"correct": correct}), "train")]),
    ):
        pass
    with (
        pytest.raises(WhetError, match="none has a weight above 0"),
        stream(routes=[Route("letters", environment(), "train", weight=0.0)]),
    ):
        pass


def test_one_more_answer_of_each_group_is_the_likeliest_and_changes_no_other() -> None:
    plain, asked = Jittery(), Jittery()
    with stream(plain) as made:
        expected = made.take(2)
    with stream(asked, greedy=True) as made:
        found, metrics = made.take(2), made.metrics()
    assert len(asked.requests) == 2 * (GROUP_SIZE + 1)
    cold = [request for request in asked.requests if request.sampling.temperature == 0]
    assert sorted(request.id for request in cold) == [f"sample-{group}-{GROUP_SIZE}-0-0-0" for group in (0, 1)]
    assert found["greedy_reward"].shape == (2 * GROUP_SIZE,)
    columns = {name: column for name, column in found.per_sequence.items() if name != "greedy_reward"}
    assert same(expected, evolve(found, per_sequence=columns))
    assert "reward/greedy" in metrics


def test_the_progress_counts_the_likeliest_answers_among_all() -> None:
    with stream(Jittery(), greedy=True, max_staleness=1) as made:
        made.take(2)
        wait_until(lambda: made.loop.call(made._progress)[0] == 2 * (GROUP_SIZE + 1), "the next take is played")
        assert made.loop.call(made._progress) == (2 * (GROUP_SIZE + 1),) * 2


def test_each_environment_has_its_own_group_size_and_sampling():
    def hotter(usual):
        return evolve(usual, temperature=2.0, max_tokens=3, stop=(*usual.stop, "!"))

    routes = [
        Route("letters", environment(), "train"),
        Route("others", environment(), "train", weight=0.5, group_size=5, sampling=hotter),
    ]
    generator = Jittery()
    with stream(generator, routes, stop=["?"]) as made:
        batch = made.take(6)
    names = np.array(batch.info["environments"])[batch["env"]]
    episodes = {name: np.unique(batch["group"][names == name], return_counts=True)[1].tolist() for name in set(names)}
    assert episodes == {"letters": [3] * 4, "others": [5] * 2}
    assert set(batch["temperature"][names == "others"].tolist()) == {2.0}
    assert set(batch["temperature"][names == "letters"].tolist()) == {1.0}
    sampled = {(one.sampling.temperature, one.sampling.max_tokens, one.sampling.stop) for one in generator.requests}
    assert sampled == {(1.0, 8, ("?",)), (2.0, 3, ("?", "!"))}
    assert batch["loss_mask"].sum() == sum(len(request) for request in batch_responses(batch))


class Broken(SingleTurn):
    """Has a curriculum that fails from its second group on."""

    asked = 0

    def difficulty(self) -> float:
        self.asked += 1
        return 1.0 / (self.asked == 1)

    def adapted(self, task: Task, difficulty: float) -> Task:
        return task

    def observe(self, groups: Any) -> None:
        pass


def test_a_curriculum_that_fails_ends_the_stream_at_once() -> None:
    route = Route("hill", Broken({"train": [Task("q")]}, {"correct": correct}), "train")
    failed = pytest.raises(WhetError, match="the curriculum of environment 'hill' failed: ZeroDivisionError")
    with stream(FakeGenerator("a", delay_seconds=3600.0), [route]) as made, failed:
        made.take(4)
    assert route.environment.asked == 2


class Unlearning(Broken):
    """Has a curriculum that fails when it is shown groups."""

    def difficulty(self) -> float:
        return 1.0

    def observe(self, groups: Any) -> None:
        raise ZeroDivisionError


def test_a_batch_of_which_a_curriculum_failed_to_learn_is_not_trained_on() -> None:
    route = Route("hill", Unlearning({"train": [Task("q")]}, {"correct": correct}), "train")
    failed = pytest.raises(WhetError, match="the curriculum of environment 'hill' failed: ZeroDivisionError")
    with stream(routes=[route]) as made, failed:
        made.take(2)


def batch_responses(batch: Batch) -> list[Any]:
    """Return the tokens that the model produced, by sequence."""
    ends = np.cumsum(batch["lengths"])
    return [
        batch["tokens"][end - n : end][p:]
        for end, n, p in zip(ends, batch["lengths"], batch["prompt_lengths"], strict=True)
    ]


def test_a_journal_that_cannot_be_written_ends_the_run_with_its_cause() -> None:
    async def run(task: Task, model: Model) -> Mapping[str, float]:
        raise ZeroDivisionError

    def journal(event: str, **details: object) -> None:
        raise WhetError("cannot write journal.jsonl: no space left")

    failing = environment()
    failing.run = run  # type: ignore[method-assign]
    with (
        stream(routes=[Route("bad", failing, "train")], journal=journal) as made,
        pytest.raises(WhetError, match=r"cannot write journal\.jsonl: no space left"),
    ):
        made.take(1)
