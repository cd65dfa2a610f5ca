"""The rules that every launcher must keep.

    class TestLocal(WorkersContract):
        @contextmanager
        def cluster(self, folder: Path) -> Iterator[Callable[[str, int], WorkerGroup]]:
            with LocalCluster(folder) as cluster:
                yield cluster.worker_group

The rules follow from `whet.interfaces.workers`. They hold for workers in this process and for worker processes.
"""

import asyncio
import math
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling
from whet.errors import WhetError, WorkerError, WorkerLost
from whet.interfaces.workers import Heard, WorkerGroup, WorkerRank, Workers
from whet_testing.scripted_worker import TARGET

SOON_SECONDS = 3.0
_PATIENCE_SECONDS = 30.0
"""Longest wait for an event. Events come far sooner unless the machine is overloaded."""


def collect(stream: AsyncIterator[Any]) -> list[Any]:
    """Return the items of a stream, which runs in an event loop of its own."""

    async def run() -> list[Any]:
        return [item async for item in stream]

    return asyncio.run(run())


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true. Fail the test if it stays false for too long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, f"not within {_PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process of this machine is alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class WorkersContract:
    """Inherit this class and override `cluster`."""

    ranks = 2

    def cluster(self, folder: Path) -> AbstractContextManager[Callable[[str, int], WorkerGroup]]:
        """Open a cluster as a context manager of a function (role, ranks) -> worker group."""
        raise NotImplementedError("override `cluster` to return worker groups")

    @pytest.fixture(scope="class")
    @classmethod
    def shared_workers(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
        """Yield workers for all tests that leave the workers unchanged."""
        with cls().cluster(tmp_path_factory.mktemp("workers")) as worker_group:
            yield worker_group("actor", cls.ranks).spawn(TARGET, {"offset": 3})

    @pytest.fixture
    def own_workers(self, tmp_path: Path) -> Iterator[Workers]:
        """Yield workers for one test, which may end them."""
        with self.cluster(tmp_path) as worker_group:
            yield worker_group("actor", self.ranks).spawn(TARGET, {"offset": 3, "trace": str(tmp_path)})

    def test_a_worker_group_says_what_it_is(self, tmp_path: Path) -> None:
        with self.cluster(tmp_path) as worker_group:
            part = worker_group("actor", self.ranks)
            assert (part.role, part.size, len(part.host_groups)) == ("actor", self.ranks, self.ranks)

    def test_each_worker_knows_its_place(self, shared_workers: Workers) -> None:
        places: list[WorkerRank] = shared_workers.call("place")
        assert [(p.role, p.rank, p.size) for p in places] == [("actor", r, self.ranks) for r in range(self.ranks)]
        assert shared_workers.size == self.ranks

    def test_a_call_gives_results_in_rank_order(self, shared_workers: Workers) -> None:
        assert shared_workers.call("add", 4) == [7] * self.ranks
        assert shared_workers.call("fail", ()) == list(range(self.ranks))

    def test_scatter_gives_each_rank_its_own(self, shared_workers: Workers) -> None:
        arguments = [(10 * rank,) for rank in range(self.ranks)]
        assert shared_workers.scatter("add", arguments) == [10 * rank + 3 for rank in range(self.ranks)]

    def test_scatter_wants_arguments_for_every_rank(self, shared_workers: Workers) -> None:
        with pytest.raises(ValueError, match=f"1 sets of arguments for the {self.ranks} ranks"):
            shared_workers.scatter("add", [(1,)])

    def test_builtins_arrays_and_records_cross_both_ways(self, shared_workers: Workers) -> None:
        request = Request("r", np.arange(5), Sampling(stop=("x",)), 2**62)
        completion = Completion("r", np.arange(3), np.zeros(3, np.float32), "stop", ((0, 1), (2, 2)))
        first = shared_workers.call("echo", {"a": [1, (2.5, None, b"x")]}, math.inf, [request, completion])[0]
        assert first[:2] == [{"a": [1, (2.5, None, b"x")]}, math.inf]
        assert first[2][0].sampling == request.sampling
        assert np.array_equal(first[2][0].tokens, np.arange(5))
        assert first[2][1].versions == completion.versions

    def test_large_arrays_cross_and_are_writable(self, shared_workers: Workers) -> None:
        array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
        for result in shared_workers.call("echo", array):
            assert np.array_equal(result[0], array)
            result[0][0, 0] = 1.0

    def test_sync_methods_run_one_at_a_time_in_order_on_one_thread(self, own_workers: Workers) -> None:
        pending = [own_workers.start("remember", number) for number in range(20)]
        threads = [p.result() for p in pending]
        assert all(thread == threads[0] for thread in threads)
        assert all(p.done() for p in pending)
        assert own_workers.call("state")[0]["seen"] == list(range(20))

    def test_calls_may_come_from_several_threads(self, shared_workers: Workers) -> None:
        results: list[list[int]] = []
        threads = [threading.Thread(target=lambda n=n: results.append(shared_workers.call("add", n))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_SECONDS)
        assert sorted(result[0] for result in results) == [n + 3 for n in range(8)]

    def test_an_exception_names_role_rank_phase_and_cause_and_the_worker_lives(self, shared_workers: Workers) -> None:
        with pytest.raises(WorkerError, match="actor rank 1 failed in train: ValueError: as told") as caught:
            shared_workers.call("fail", (1,), phase="train")
        error = caught.value
        assert (error.role, error.rank, error.phase) == ("actor", 1, "train")
        assert "ValueError: as told" in error.cause
        assert "raise ValueError(message)" in error.details
        assert shared_workers.call("add", 1) == [4] * self.ranks

    def test_without_a_phase_an_error_names_the_method(self, shared_workers: Workers) -> None:
        with pytest.raises(WorkerError, match="failed in fail: "):
            shared_workers.call("fail")

    def test_a_started_call_raises_from_its_result(self, shared_workers: Workers) -> None:
        pending = shared_workers.start("fail")
        for _ in range(2):
            with pytest.raises(WorkerError, match="as told"):
                pending.result()
        assert pending.done()

    @pytest.mark.parametrize("method", ["no_such_method", "_answer", "rank", "__init__"])
    def test_only_public_methods_can_be_called(self, shared_workers: Workers, method: str) -> None:
        with pytest.raises(WorkerError, match=f"no public method '{method}'"):
            shared_workers.call(method)

    def test_an_argument_that_cannot_cross_is_refused_with_its_place(self, shared_workers: Workers) -> None:
        with pytest.raises(WhetError, match="object"):
            shared_workers.call("echo", [object()])

    def test_a_result_that_cannot_cross_is_an_error_of_the_call(self, shared_workers: Workers) -> None:
        with pytest.raises(WorkerError, match=r"the value.*\['inside'\] is .*object"):
            shared_workers.call("unsendable")

    def test_coroutine_methods_answer(self, shared_workers: Workers) -> None:
        assert shared_workers.call("later", "x") == ["x"] * self.ranks

    def test_a_stream_gives_what_one_rank_yields(self, shared_workers: Workers) -> None:
        assert collect(shared_workers.stream(1, "count", 5)) == [(1, n) for n in range(5)]

    def test_streams_run_beside_each_other_and_beside_calls(self, shared_workers: Workers) -> None:
        async def run() -> list[list[Any]]:
            async def one() -> list[Any]:
                return [item async for item in shared_workers.stream(0, "count", 5, -1, 0.05)]

            return await asyncio.gather(*[one() for _ in range(8)])

        begin = time.monotonic()
        assert asyncio.run(run()) == [[(0, n) for n in range(5)]] * 8
        assert time.monotonic() - begin < 8 * 5 * 0.05

    def test_streams_of_several_ranks_give_what_each_of_them_yields(self, shared_workers: Workers) -> None:
        shares = {rank: [0.01 * n for n in range(rank)] for rank in range(self.ranks)}

        async def run() -> dict[int, list[Any]]:
            found: dict[int, list[Any]] = {rank: [] for rank in shares}
            async for heard in shared_workers.streams("nap", shares):
                assert heard.error is None
                found[heard.rank] += heard.items
            return found

        expected = {rank: [(rank, seconds) for seconds in share] for rank, share in shares.items()}
        assert asyncio.run(run()) == expected

    def test_of_several_streams_those_that_fail_fail_alone(self, shared_workers: Workers) -> None:
        async def run() -> list[Heard]:
            shares = {0: [0.01], 1: [cast(float, "long")]}
            return [heard async for heard in shared_workers.streams("nap", shares, phase="generate") if heard.over]

        errors = {heard.rank: heard.error for heard in asyncio.run(run())}
        assert errors[0] is None
        assert "actor rank 1 failed in generate: TypeError" in str(errors[1])

    def test_a_stream_s_exception_comes_after_its_items(self, shared_workers: Workers) -> None:
        async def run() -> list[Any]:
            items = []
            with pytest.raises(WorkerError, match="actor rank 0 failed in generate: ValueError: as told"):
                async for item in shared_workers.stream(0, "count", 5, 2, phase="generate"):
                    items.append(item)
            return items

        assert asyncio.run(run()) == [(0, 0), (0, 1)]

    def test_calling_a_stream_or_streaming_a_call_is_an_error(self, shared_workers: Workers) -> None:
        with pytest.raises(WorkerError, match="use stream"):
            shared_workers.call("count", 3)
        with pytest.raises(WorkerError):
            collect(shared_workers.stream(0, "add", 3))

    def test_closing_a_stream_cancels_it_in_the_worker(self, own_workers: Workers) -> None:
        async def run() -> None:
            async with aclosing(cast(Any, own_workers.stream(0, "count", 1_000_000, -1, 0.001))) as items:
                async for _ in items:
                    break

        asyncio.run(run())
        wait_until(lambda: own_workers.call("state")[0]["cancelled"] == 1, "the worker saw its stream closed")

    def test_cancelling_the_task_cancels_its_stream_in_the_worker(self, own_workers: Workers) -> None:
        async def run() -> None:
            async def endless() -> None:
                async for _ in own_workers.stream(0, "count", 2, -1, 1000.0):
                    pass

            task = asyncio.create_task(endless())
            while not own_workers.call("state")[0]["streams"]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(run())
        wait_until(lambda: own_workers.call("state")[0]["cancelled"] == 1, "the worker saw its stream cancelled")

    def test_a_stream_can_work_on_the_compute_thread(self, shared_workers: Workers) -> None:
        assert collect(shared_workers.stream(0, "compute", 4)) == [7]

    def test_a_constructor_that_raises_is_an_error_of_the_start(self, tmp_path: Path) -> None:
        with (
            self.cluster(tmp_path) as worker_group,
            pytest.raises(WorkerError, match=r"actor rank \d failed in start: ValueError: rank \d was told not to"),
        ):
            worker_group("actor", self.ranks).spawn(TARGET, {"fail": True})

    def test_a_target_that_cannot_be_imported_is_an_error_of_the_start(self, tmp_path: Path) -> None:
        with self.cluster(tmp_path) as worker_group, pytest.raises(WorkerError, match="no_such_module"):
            worker_group("actor", 1).spawn("no_such_module:Worker", {})

    def test_a_call_on_one_rank_reaches_that_one(self, shared_workers: Workers) -> None:
        (place,) = shared_workers.start_on(1, "place").result()
        assert place.rank == 1
        with pytest.raises(WorkerError, match="actor rank 1 failed in train: ValueError: as told"):
            shared_workers.start_on(1, "fail", (1,), phase="train").result()

    def test_of_ranks_that_are_asked_each_for_itself_one_fails_alone(self, shared_workers: Workers) -> None:
        started = shared_workers.start_each([0, 1], "fail", (1,), phase="train")
        with pytest.raises(WorkerError, match="actor rank 1 failed in train: ValueError: as told"):
            started.result(1)
        assert started.result(0) == 0
        assert started.done()

    def test_when_a_rank_that_was_asked_for_itself_has_answered_or_failed_is_told(
        self, shared_workers: Workers
    ) -> None:
        told = queue.SimpleQueue[tuple[int, bool]]()

        def tell(rank: int, error: WorkerError | None) -> None:
            told.put((rank, error is None))

        for method, arguments in (("hang", (0.3,)), ("fail", ((0, 1),))):
            started = shared_workers.start_each([0, 1], method, *arguments)
            waits = [rank for rank in range(3) if started.when(rank, partial(tell, rank))]
            assert 2 not in waits, "it was not asked"
            heard = sorted(told.get(timeout=SOON_SECONDS) for _ in waits)
            assert heard == [(rank, method == "hang") for rank in waits]
            assert not any(started.when(rank, partial(tell, rank)) for rank in range(2)), "it is over"
        assert told.empty()

    def test_a_rank_is_restarted_as_it_was_at_first_and_the_others_stay(self, own_workers: Workers) -> None:
        assert own_workers.alone
        own_workers.call("remember", "before")
        own_workers.restart(1)
        seen = [state["seen"] for state in own_workers.call("state")]
        assert seen == [[] if rank == 1 else ["before"] for rank in range(self.ranks)]
        assert own_workers.call("add", 1) == [4] * self.ranks
        assert collect(own_workers.stream(1, "count", 2)) == [(1, 0), (1, 1)]
        assert [place.rank for place in own_workers.call("place")] == list(range(self.ranks))

    def test_several_roles_live_side_by_side(self, tmp_path: Path) -> None:
        with self.cluster(tmp_path) as worker_group:
            one = worker_group("one", 1).spawn(TARGET, {"offset": 1})
            two = worker_group("two", 1).spawn(TARGET, {"offset": 2})
            assert one.call("add", 0) + two.call("add", 0) == [1, 2]
            one.close()
            assert two.call("add", 0) == [2]

    def test_close_closes_the_workers_and_may_come_twice(self, own_workers: Workers, tmp_path: Path) -> None:
        own_workers.close()
        own_workers.close()
        assert all((tmp_path / f"closed-actor-{rank}").exists() for rank in range(self.ranks))
        with pytest.raises(WorkerError, match="closed"):
            own_workers.call("add", 1)


class ProcessWorkersContract(WorkersContract):
    """The contract of launchers whose workers are processes. Such workers may die, hang and be killed."""

    def pids(self, workers: Workers) -> list[int]:
        """Return the process id of each rank."""
        return [state["pid"] for state in workers.call("state")]

    def test_every_rank_is_a_process_and_knows_where_to_meet_the_others(self, own_workers: Workers) -> None:
        pids = self.pids(own_workers)
        assert len({*pids, os.getpid()}) == self.ranks + 1
        meeting = {place.rendezvous for place in own_workers.call("place")}
        assert len(meeting) == 1
        assert meeting.pop().startswith(("tcp://", "file://"))

    def test_a_killed_rank_fails_the_call_at_once(self, own_workers: Workers) -> None:
        pid = self.pids(own_workers)[1]
        pending = own_workers.start("hang", phase="train")
        time.sleep(0.05)
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="actor rank 1 failed in train") as caught:
            pending.result()
        assert time.monotonic() - begin < SOON_SECONDS
        assert caught.value.rank == 1
        with pytest.raises(WorkerError, match="rank 1"):
            own_workers.call("add", 1)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_rank_that_died_or_hangs_is_replaced_by_a_fresh_process(
        self, own_workers: Workers, number: signal.Signals
    ) -> None:
        before = self.pids(own_workers)
        os.kill(before[1], number)
        lost = own_workers.start_on(1, "hang")
        own_workers.restart(1)
        with pytest.raises(WorkerLost, match="actor rank 1 failed in hang"):
            lost.result()
        after = self.pids(own_workers)
        assert after[0] == before[0]
        assert after[1] not in before
        wait_until(lambda: not alive(before[1]), "the old process is gone")

    def test_a_missed_deadline_of_one_rank_ends_that_one_alone(self, own_workers: Workers) -> None:
        with pytest.raises(WorkerLost, match=r"actor rank 1 failed in hang: no answer within 0\.3 s"):
            own_workers.start_on(1, "hang", timeout_seconds=0.3).result()
        assert own_workers.start_on(0, "add", 1).result() == [4]
        own_workers.restart(1)
        assert own_workers.call("add", 1) == [4] * self.ranks

    def test_what_died_is_told_from_what_raised(self, own_workers: Workers) -> None:
        with pytest.raises(WorkerError) as raised:
            own_workers.call("fail")
        assert not isinstance(raised.value, WorkerLost)
        with pytest.raises(WorkerLost):
            own_workers.call("die", -3)
        own_workers.close()
        with pytest.raises(WorkerError) as closed:
            own_workers.call("add", 1)
        assert not isinstance(closed.value, WorkerLost)

    def test_a_crash_is_told_with_its_last_words(self, own_workers: Workers) -> None:
        with pytest.raises(WorkerError) as caught:
            arguments = [(signal.SIGSEGV, "here I lie"), *[(0, "")] * (self.ranks - 1)]
            own_workers.scatter("die", arguments, phase="train")
        assert caught.value.rank == 0
        assert "here I lie" in caught.value.last_words

    def test_an_exit_fails_streams_too(self, own_workers: Workers) -> None:
        async def run() -> None:
            stream = own_workers.stream(0, "count", 2, -1, 1000.0, phase="generate")
            task = asyncio.create_task(cast(Any, stream).__anext__())
            await asyncio.sleep(0.1)
            dying = own_workers.start("die", -3)
            with pytest.raises(WorkerError, match="actor rank 0 failed in generate"):
                await asyncio.wait_for(task, SOON_SECONDS)
            with pytest.raises(WorkerError):
                dying.result()

        asyncio.run(run())

    def test_a_missed_deadline_is_an_error_that_names_it_and_ends_the_workers(self, own_workers: Workers) -> None:
        pids = self.pids(own_workers)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"actor rank \d failed in train: no answer within 0\.3 s"):
            own_workers.call("hang", phase="train", timeout_seconds=0.3)
        assert 0.3 <= time.monotonic() - begin < 0.3 + SOON_SECONDS
        wait_until(lambda: not any(map(alive, pids)), "the processes are gone")
        with pytest.raises(WorkerError):
            own_workers.call("add", 1)

    def test_an_answer_that_is_late_for_its_call_is_not_taken_for_another_s(self, own_workers: Workers) -> None:
        async def run() -> None:
            async with aclosing(cast(Any, own_workers.stream(0, "count", 100))) as items:
                async for _ in items:
                    break

        asyncio.run(run())
        assert own_workers.call("add", 1) == [4] * self.ranks

    def test_a_rank_that_fails_does_not_wait_for_one_that_hangs(self, own_workers: Workers) -> None:
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="rank 0 failed in fail_or_hang: ValueError"):
            own_workers.call("fail_or_hang", 0, timeout_seconds=60.0)
        assert time.monotonic() - begin < SOON_SECONDS

    def test_a_large_argument_for_a_stopped_worker_does_not_block_past_the_deadline(self, own_workers: Workers) -> None:
        os.kill(self.pids(own_workers)[0], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"rank 0 failed in echo: no answer within 0\.5 s"):
            own_workers.call("echo", np.zeros(10_000_000, np.uint8), timeout_seconds=0.5)
        assert time.monotonic() - begin < 0.5 + SOON_SECONDS

    def test_close_ends_hung_workers_and_what_they_started(self, own_workers: Workers) -> None:
        pids = self.pids(own_workers) + own_workers.call("start_child")
        hanging = own_workers.start("hang")
        begin = time.monotonic()
        own_workers.close()
        assert time.monotonic() - begin < SOON_SECONDS
        with pytest.raises(WorkerError):
            hanging.result()
        wait_until(lambda: not any(map(alive, pids)), "the processes are gone")
