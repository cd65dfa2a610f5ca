"""Requests reach replicas in few messages, spread by load; whatever happens there reaches those who wait."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling
from whet.errors import WhetError, WorkerError
from whet.interfaces.workers import Heard
from whet.runtime.inline import InlineWorkerGroup, merged
from whet.runtime.workers import Answers
from whet_generation.dispatcher import RequestDispatcher


class Replicas:
    """Stands for workers, at the edge that the dispatcher sees: what each stream is asked, and what it answers."""

    def __init__(self, size: int, answer: Callable[["Replicas", int, list[Request]], AsyncIterator[Any]]) -> None:
        self.size, self._answer = size, answer
        self.messages: list[tuple[int, list[str]]] = []
        self.aborted: list[tuple[int, list[str]]] = []
        self.closed = 0

    async def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        if method == "abort":
            self.aborted.append((rank, args[0]))
            return
        self.messages.append((rank, [request.id for request in args[0]]))
        try:
            async for outcomes in self._answer(self, rank, args[0]):
                yield outcomes
        finally:
            self.closed += 1

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncIterator[Heard]:
        return merged({rank: self.stream(rank, method, share, phase=phase) for rank, share in shares.items()})


async def turns(number: int = 50) -> None:
    """Run the event loop until nothing is left that could go on by itself."""
    for _ in range(number):
        await asyncio.sleep(0)


async def echo(replicas: Replicas, rank: int, requests: list[Request]) -> AsyncIterator[Any]:
    await asyncio.sleep(0)
    yield [completion(request) for request in requests]


async def never(replicas: Replicas, rank: int, requests: list[Request]) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield []


def completion(request: Request) -> Completion:
    return Completion(request.id, request.tokens + 1, np.zeros(len(request.tokens), np.float32), "stop", ((0, 0),))


def make_request(id_: str, prefix: str = "", length: int = 3, max_tokens: int = 8) -> Request:
    return Request(id_, np.arange(length), Sampling(max_tokens), 0, prefix)


def dispatcher_over(size: int, answer: Any = echo) -> tuple[RequestDispatcher, Replicas]:
    replicas = Replicas(size, answer)
    return RequestDispatcher(replicas), replicas  # type: ignore[arg-type]


LIVES = {0: 0, 1: 0}
"""Of replicas that were never lost."""


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 10))


async def gather(dispatcher: RequestDispatcher, requests: list[Request]) -> list[Any]:
    return await asyncio.gather(*map(dispatcher.generate, requests), return_exceptions=True)


def test_requests_made_together_travel_in_one_message_per_replica() -> None:
    dispatcher, replicas = dispatcher_over(2)
    found = run(gather(dispatcher, [make_request(str(i)) for i in range(10)]))
    assert [c.id for c in found] == [str(i) for i in range(10)]
    assert sorted(rank for rank, _ in replicas.messages) == [0, 1]


def test_requests_made_a_few_turns_of_the_loop_apart_still_travel_together() -> None:
    async def later(dispatcher: RequestDispatcher, id_: str, after: int) -> Completion:
        await turns(after)
        return await dispatcher.generate(make_request(id_))

    async def episodes(dispatcher: RequestDispatcher) -> None:
        await asyncio.gather(
            *(later(dispatcher, id_, after) for id_, after in {"a": 1, "b": 1, "c": 2, "d": 3}.items())
        )

    dispatcher, replicas = dispatcher_over(1)
    run(episodes(dispatcher))
    assert replicas.messages == [(0, ["a", "b", "c", "d"])]


def test_requests_made_later_travel_in_another_message() -> None:
    async def two(dispatcher: RequestDispatcher) -> None:
        await dispatcher.generate(make_request("a"))
        await dispatcher.generate(make_request("b"))

    dispatcher, replicas = dispatcher_over(1)
    run(two(dispatcher))
    assert replicas.messages == [(0, ["a"]), (0, ["b"])]


def test_equal_prefixes_go_to_one_replica_and_the_groups_spread_over_all() -> None:
    dispatcher, replicas = dispatcher_over(4)
    run(gather(dispatcher, [make_request(f"{g}.{s}", prefix=str(g)) for g in range(8) for s in range(4)]))
    where = {id_: rank for rank, ids in replicas.messages for id_ in ids}
    for group in range(8):
        assert len({where[f"{group}.{sample}"] for sample in range(4)}) == 1
    assert set(Counter(where.values()).values()) == {8}


def test_load_is_counted_in_tokens() -> None:
    dispatcher, replicas = dispatcher_over(2)
    requests = [make_request("long", length=90, max_tokens=10), *(make_request(str(i)) for i in range(8))]
    run(gather(dispatcher, requests))
    assert dict(replicas.messages)[0] == ["long"]
    assert dispatcher.outstanding == [0, 0]


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    async def picky(replicas: Replicas, rank: int, requests: list[Request]) -> AsyncIterator[Any]:
        yield [("1", "a prompt of 300 tokens leaves no room")]
        yield [completion(request) for request in requests if request.id != "1"]

    dispatcher, _ = dispatcher_over(1, picky)
    zero, one, two = run(gather(dispatcher, [make_request(str(i)) for i in range(3)]))
    assert (zero.id, two.id) == ("0", "2")
    assert isinstance(one, WhetError)
    assert "leaves no room" in str(one)
    assert not isinstance(one, WorkerError)


def test_a_dead_replica_fails_all_that_wait_for_it_and_no_others() -> None:
    async def dying(replicas: Replicas, rank: int, requests: list[Request]) -> AsyncIterator[Any]:
        yield [completion(requests[0])]
        if rank == 1:
            raise WorkerError("generator", 1, "generate", "killed by signal 9")
        yield [completion(request) for request in requests[1:]]

    dispatcher, _ = dispatcher_over(2, dying)
    found = run(gather(dispatcher, [make_request(str(i)) for i in range(6)]))
    dead = [f for f in found if isinstance(f, WorkerError)]
    assert len(dead) == 2
    assert all("killed by signal 9" in str(error) for error in dead)
    assert dispatcher.outstanding == [0, 0]


def test_a_replica_that_ends_without_answering_is_an_error() -> None:
    async def silent(replicas: Replicas, rank: int, requests: list[Request]) -> AsyncIterator[Any]:
        yield []

    dispatcher, _ = dispatcher_over(1, silent)
    (found,) = run(gather(dispatcher, [make_request("a")]))
    assert isinstance(found, WorkerError)
    assert "without answering" in str(found)


def test_cancelling_aborts_the_request_at_its_replica_and_no_other() -> None:
    async def cancelling(dispatcher: RequestDispatcher, replicas: Replicas) -> None:
        tasks = [asyncio.create_task(dispatcher.generate(make_request(str(i)))) for i in range(3)]
        while not replicas.messages:
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait(tasks[::2])
        for _ in range(5):
            await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, False, True]
        tasks[1].cancel()

    dispatcher, replicas = dispatcher_over(1, never)
    run(cancelling(dispatcher, replicas))
    assert replicas.aborted[0] == (0, ["0", "2"])


def test_a_request_cancelled_before_it_left_is_never_sent() -> None:
    async def cancelling(dispatcher: RequestDispatcher) -> None:
        gone, kept = (asyncio.create_task(dispatcher.generate(make_request(id_))) for id_ in ("gone", "kept"))
        await asyncio.sleep(0)
        gone.cancel()
        await kept

    dispatcher, replicas = dispatcher_over(1)
    run(cancelling(dispatcher))
    assert replicas.messages == [(0, ["kept"])]
    assert dispatcher.outstanding == [0]


def test_two_requests_of_one_id_are_refused() -> None:
    dispatcher, _ = dispatcher_over(1)
    found = run(gather(dispatcher, [make_request("a"), make_request("a")]))
    assert all(isinstance(error, WhetError) and "same id" in str(error) for error in found)


class EchoWorker:
    """A worker as generators have them."""

    def __init__(self, rank: object) -> None:
        self.batches = 0

    async def generate(self, requests: list[Request]) -> AsyncIterator[list[Completion]]:
        self.batches += 1
        for request in requests:
            yield [completion(request)]


def test_completions_cross_the_wire_of_real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("echo_worker_of_dispatch")
    module.EchoWorker = EchoWorker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "echo_worker_of_dispatch", module)
    workers = InlineWorkerGroup("generator", size=2).spawn("echo_worker_of_dispatch:EchoWorker", {})
    found = run(gather(RequestDispatcher(workers), [make_request(str(i), length=i + 1) for i in range(5)]))
    assert [(c.id, c.tokens.tolist()) for c in found] == [(str(i), list(range(1, i + 2))) for i in range(5)]


def test_what_comes_while_a_replica_takes_weights_waits_for_that_one_alone() -> None:
    dispatcher, replicas = dispatcher_over(2)

    async def ask() -> list[Completion]:
        taking = Answers([0, 1])
        dispatcher.hold(taking, LIVES)
        first = asyncio.gather(*(dispatcher.generate(make_request(str(i), prefix=f"p{i % 2}")) for i in range(4)))
        await turns()
        assert replicas.messages == []
        taking.finish(1, None, None)
        await turns()
        assert [(rank, len(ids)) for rank, ids in replicas.messages] == [(1, 2)]
        later = asyncio.create_task(dispatcher.generate(make_request("later", prefix="p0")))
        await turns()
        assert len(replicas.messages) == 1
        taking.finish(0, None, None)
        return [*await first, await later]

    found = run(ask())
    assert [completion.id for completion in found] == ["0", "1", "2", "3", "later"]
    assert [rank for rank, _ in replicas.messages] == [1, 0], "what was held goes in one message"
    assert dispatcher.outstanding == [0, 0]


def test_what_a_replica_has_said_from_another_thread_reaches_the_loop() -> None:
    dispatcher, replicas = dispatcher_over(1)

    async def ask() -> list[Any]:
        found = []
        for version in range(50):
            taking = Answers([0])
            dispatcher.hold(taking, LIVES)
            asked = asyncio.create_task(dispatcher.generate(make_request(str(version))))
            thread = threading.Thread(target=taking.finish, args=(0, None, None))
            await asyncio.sleep(0.0002 * (version % 5))
            thread.start()
            found.append(await asked)
            thread.join()
        return found

    assert len(run(ask())) == len(replicas.messages) == 50


def test_who_gives_up_while_it_is_held_is_never_asked_for() -> None:
    dispatcher, replicas = dispatcher_over(1)

    async def ask() -> None:
        taking = Answers([0])
        dispatcher.hold(taking, LIVES)
        tasks = [asyncio.create_task(dispatcher.generate(make_request(id_, prefix="p"))) for id_ in ("a", "b")]
        await turns()
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        taking.finish(0, None, None)
        await tasks[1]

    run(ask())
    assert replicas.messages == [(0, ["b"])]
    assert dispatcher.outstanding == [0]
    assert dispatcher._prefixes == {}


def test_what_is_held_for_a_replica_that_fails_to_take_its_weights_is_not_forgotten() -> None:
    dispatcher, _ = dispatcher_over(1)

    async def ask() -> Completion:
        taking = Answers([0])
        dispatcher.hold(taking, LIVES)
        asked = asyncio.create_task(dispatcher.generate(make_request("a")))
        await turns()
        taking.finish(0, None, WorkerError("generator", 0, "weight_sync", "it was told to"))
        return await asked

    assert run(ask()).id == "a"
