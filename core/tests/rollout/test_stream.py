import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config.sections import RolloutSection
from whet.data.batch import Batch
from whet.data.records import Completion, Group, Request, Task
from whet.errors import CheckpointError, DataError, WhetError, WorkerError
from whet.interfaces.environment import Model, SingleTurn
from whet.rollout.loop import EpisodeLoop
from whet.rollout.routing import Route
from whet.rollout.stream import RolloutStream
from whet.testing.fakes import ByteChat, FakeGenerator

GROUP_SIZE = 3


class Jittery(FakeGenerator):
    """Answers with random letters after random delays."""

    def __init__(self, jitter: int = 0, longest: float = 0.002) -> None:
        super().__init__(lambda prompt, rng: "".join(rng.choice(list("abcd"), rng.integers(1, 6))))
        self._random = random.Random(jitter)
        self.longest = longest

    async def generate(self, request: Request) -> Completion:
        version, self._delay = self.version, self._random.uniform(0, self.longest)
        made = await super().generate(request)
        return Completion(made.id, made.tokens, made.logprobs, made.stop, ((0, version),))

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
    names = {"group_size", "seed", "filters", "deadline_seconds", "status", "loop"}
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
    """Take, train a moment, hand over: the driver's part."""
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


@settings(max_examples=12, deadline=None)
@given(
    staleness=st.sampled_from([0, 1, 3]),
    size=st.integers(1, 4),
    jitter=st.integers(0, 1000),
    filtered=st.booleans(),
)
def test_no_group_is_lost_repeated_reordered_or_too_old(staleness: int, size: int, jitter: int, filtered: bool) -> None:
    keep = some_dropped if filtered else lambda group: True
    ahead, handed_over = [], list[int]()

    class Watching(Jittery):
        async def generate(self, request: Request) -> Completion:
            # Groups that are known to be filtered do not count, so this is an upper bound only without filters.
            ahead.append(len(set(self.groups)) - len(handed_over))
            return await super().generate(request)

    generator = Watching(jitter)
    with stream(generator, max_staleness=staleness, filters=[keep]) as made:
        for step in range(1, 7):
            batch = made.take(size)
            groups = list(dict.fromkeys(batch["group"].tolist()))
            assert len(groups) == size
            handed_over += groups
            made_by = batch["version"][batch["loss_mask"]]
            assert (step - 1 - made_by).max() <= staleness
            assert (step - 1 - made_by).min() >= 0
            assert made.metrics()["staleness/max"].number() == (step - 1 - made_by).max()
            generator.version = step
            made.set_version(step)
        seen = set(generator.groups)
    expected = [index for index in range(max(handed_over) + 1) if not filtered or index % 3 != 1]
    assert handed_over == expected, "every kept group once, in order of admission"
    assert seen == set(range(max(seen) + 1))
    kept_ahead = [i for i in seen - set(handed_over) if not filtered or i % 3 != 1]
    assert len(kept_ahead) <= staleness * size
    assert len(generator.requests) == len({request.id for request in generator.requests})
    assert not generator.cancelled or staleness
    if not filtered:
        assert max(ahead) <= size * (staleness + 1)


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


def test_with_staleness_what_was_not_handed_over_is_played_again() -> None:
    generator = Jittery()
    with stream(generator, two_routes(), max_staleness=2) as made:
        first = drive(made, generator, 2, 3)[-1]
        state = made.state()
    assert sum(state["groups"].values()) == max(first["group"]) + 1
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
    assert np.bincount(batch["env"][::GROUP_SIZE]).tolist() == [12, 4]


def test_every_task_comes_once_in_each_pass() -> None:
    with stream(routes=[Route("letters", environment(6), "train")]) as made:
        made.take(12)
        tasks = [group.task for group in made.last_groups]
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

    def __init__(self, bad: set[int], attempts: int = 1000) -> None:
        super().__init__({"train": [Task(f"q{i}", {"i": i}) for i in range(20)]}, {"correct": correct})
        self._bad, self._attempts = bad, attempts
        self.failures: dict[int, int] = {}

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        rewards = await super().run(task, model)
        index = task.data["i"]
        if index in self._bad and self.failures.get(index, 0) < self._attempts:
            self.failures[index] = self.failures.get(index, 0) + 1
            raise RuntimeError("the grader broke")
        return rewards


def test_a_group_that_fails_is_dropped_counted_and_replaced() -> None:
    bad = {3, 8}
    with stream(routes=[Route("fragile", Failing(bad), "train")], retries=1) as made:
        made.take(18)
        tasks = {group.task for group in made.last_groups}
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
        assert made.state() == {"groups": {"letters": 0}}
        batch = made.take(2)
        assert sorted(set(batch["group"].tolist())) == [0, 1]
        assert made.state() == {"groups": {"letters": 2}}
    assert told[0] in {f"generator {100 * done / 6:.0f} %" for done in range(7)}
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
        assert time.monotonic() - begin < 1.0
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
        with pytest.raises(WhetError, match="2 versions old at its hand-over, wanted at most 1"):
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
