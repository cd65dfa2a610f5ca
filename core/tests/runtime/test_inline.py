import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from whet.errors import WorkerError
from whet.interfaces.workers import WorkerGroup
from whet.runtime.inline import InlineWorkerGroup
from whet.runtime.worker_process import compute_thread
from whet_testing.contracts.workers import WorkersContract
from whet_testing.scripted_worker import TARGET


class TestInline(WorkersContract):
    @contextmanager
    def cluster(self, folder: Path) -> Iterator[Callable[[str, int], WorkerGroup]]:
        yield lambda role, size: InlineWorkerGroup(role, size)


def test_sync_methods_run_in_the_calling_thread_so_that_a_debugger_works() -> None:
    workers = InlineWorkerGroup("actor").spawn(TARGET, {})
    assert workers.call("remember", 0) == [threading.get_ident()]


def test_errors_are_chained_from_what_was_raised() -> None:
    workers = InlineWorkerGroup("actor").spawn(TARGET, {})
    with pytest.raises(WorkerError) as caught:
        workers.call("fail")
    assert isinstance(caught.value.__cause__, ValueError)


def test_all_roles_share_one_process() -> None:
    assert set(InlineWorkerGroup("a", 2).host_groups) == set(InlineWorkerGroup("b").host_groups)


def test_a_coroutine_method_runs_on_the_loop_where_streams_run() -> None:
    workers = InlineWorkerGroup("actor").spawn(TARGET, {})

    async def run() -> list[object]:
        async for _ in workers.stream(0, "count", 1):
            pass
        return await asyncio.to_thread(workers.call, "later", 5)

    assert asyncio.run(run()) == [5]


def test_there_is_one_compute_thread_and_it_is_not_this_one() -> None:
    idents = {compute_thread().submit(threading.get_ident).result() for _ in range(5)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_job_that_waits_for_another_on_the_compute_thread_is_told_so() -> None:
    compute = compute_thread()
    with pytest.raises(RuntimeError, match="waits for another"):
        compute.submit(lambda: compute.submit(int).result()).result(timeout=5.0)


def test_a_job_that_runs_out_of_items_fails_also_where_it_is_awaited() -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(compute_thread(), next, iter([])), 10)

    with pytest.raises(RuntimeError, match="next raised StopIteration"):
        asyncio.run(run())
