"""A replica that is lost costs its requests a detour: they go to others, or wait, and nothing is asked in vain."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import numpy as np
import pytest

from whet.data.records import Completion, Request, Sampling
from whet.errors import ClusterLost, RequestLost, WorkerError, WorkerLost
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import Give, Heard
from whet.runtime.inline import merged
from whet.runtime.workers import Answers
from whet_generation.dispatcher import MOST_LOSSES, RequestDispatcher
from whet_generation.replica_set import ReplicaSet

LINK = TransferSpec("disk", "somewhere", "3-0", 3)


class Mortal:
    """Workers at the edge that replicas and dispatcher see: a rank dies with its message where it is told to."""

    alone = True

    def __init__(self, size: int, dies: Callable[[int, int], bool]) -> None:
        """`dies(rank, message)`: whether the rank dies of its n-th message, counted over all its lives."""
        self.size, self._dies = size, dies
        self.messages: list[tuple[int, list[tuple[str, int]]]] = []
        self.restarted: list[int] = []
        self.holds = [threading.Event() for _ in range(size)]
        """Where one is cleared, its restart waits."""
        for event in self.holds:
            event.set()

    async def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        count = sum(other == rank for other, _ in self.messages)
        self.messages.append((rank, [(request.id, request.seed) for request in args[0]]))
        await asyncio.sleep(0)
        if self._dies(rank, count):
            raise WorkerLost("generator", rank, "generate", "killed by signal 9")
        yield [Completion(r.id, r.tokens, np.zeros(len(r.tokens), np.float32), "stop", ((0, rank),)) for r in args[0]]

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncIterator[Heard]:
        return merged({rank: self.stream(rank, method, share, phase=phase) for rank, share in shares.items()})

    def restart(self, rank: int) -> None:
        assert self.holds[rank].wait(10)
        self.restarted.append(rank)


class Granting:
    """Grants so many restarts."""

    def __init__(self, grants: int) -> None:
        self.left = grants
        self.losses = Counter[str]()
        self.asked: list[WorkerLost] = []

    def grant(self, error: WorkerLost) -> bool:
        self.asked.append(error)
        self.left -= 1
        return self.left >= 0

    def sync(self, give: Give) -> None:
        give(LINK)


def made(workers: Mortal, grants: int = 10) -> tuple[RequestDispatcher, Granting, list[tuple[int, TransferSpec]]]:
    received: list[tuple[int, TransferSpec]] = []
    granting = Granting(grants)
    replicas = ReplicaSet(workers, granting, lambda rank, spec, proof: received.append((rank, spec)))  # type: ignore[arg-type]
    dispatcher = RequestDispatcher(workers, replicas)  # type: ignore[arg-type]
    replicas.changed = dispatcher.wake
    return dispatcher, granting, received


def requests(count: int) -> list[Request]:
    return [Request(f"r{i}", np.arange(3), Sampling(8), 100 + i) for i in range(count)]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def ask(dispatcher: RequestDispatcher, asked: list[Request]) -> list[Any]:
    return await asyncio.gather(*map(dispatcher.generate, asked), return_exceptions=True)


def test_requests_of_a_lost_replica_go_to_another_with_their_ids_and_seeds() -> None:
    workers = Mortal(2, lambda rank, message: rank == 1 and message == 0)
    workers.holds[1].clear()  # it does not come back meanwhile
    dispatcher, _, _ = made(workers)
    found = run(ask(dispatcher, requests(6)))
    assert [completion.id for completion in found] == [f"r{i}" for i in range(6)]
    assert {completion.versions[0][1] for completion in found} == {0}
    lost = next(message for rank, message in workers.messages if rank == 1)
    assert workers.messages[-1] == (0, lost)
    assert dispatcher.outstanding == [0, 0]
    workers.holds[1].set()


def test_the_only_replica_is_waited_for_and_has_the_weights_before_it_is_asked() -> None:
    workers = Mortal(1, lambda rank, message: message == 0)
    dispatcher, granting, received = made(workers)
    found = run(ask(dispatcher, requests(3)))
    assert [completion.id for completion in found] == ["r0", "r1", "r2"]
    assert workers.restarted == [0]
    assert received == [(0, LINK)]
    assert [str(error) for error in granting.asked] == ["generator rank 0 failed in generate: killed by signal 9"]


def test_a_restart_that_is_lost_because_the_run_ends_is_not_tried_again() -> None:
    began, ended = threading.Event(), threading.Event()

    class Ending(Mortal):
        def restart(self, rank: int) -> None:
            self.restarted.append(rank)
            began.set()
            assert ended.wait(10)
            if len(self.restarted) < 3:
                raise WorkerLost("generator", rank, "start", "its process was closed")

    workers = Ending(1, lambda rank, message: False)
    replicas = ReplicaSet(workers, Granting(10))  # type: ignore[arg-type]
    assert replicas.lost(0, 0, WorkerLost("generator", 0, "generate", "killed by signal 9"))
    assert began.wait(10)
    replicas.close()
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "whet-replace-0":
            thread.join(10)
    assert workers.restarted == [0]


def test_no_replica_is_started_anew_where_all_processes_are_lost() -> None:
    came_to_know = threading.Event()

    class Gone(Mortal):
        def restart(self, rank: int) -> None:
            raise ClusterLost("generator", rank, "start", "Ray is gone")

    granting = Granting(10)
    at_once = ReplicaSet(Gone(1, lambda rank, message: False), granting)  # type: ignore[arg-type]
    assert not at_once.lost(0, 0, ClusterLost("generator", 0, "generate", "Ray is gone"))
    assert isinstance(at_once.failure, ClusterLost)
    assert not granting.asked
    later = ReplicaSet(Gone(1, lambda rank, message: False), granting, changed=came_to_know.set)  # type: ignore[arg-type]
    assert later.lost(0, 0, WorkerLost("generator", 0, "generate", "killed by signal 9"))
    assert came_to_know.wait(10)
    assert isinstance(later.failure, ClusterLost)
    assert len(granting.asked) == 1


def test_a_request_for_one_replica_goes_there_or_nowhere() -> None:
    workers = Mortal(2, lambda rank, message: rank == 1 and message == 1)
    workers.holds[1].clear()
    dispatcher, _, _ = made(workers)

    def pinned(name: str) -> list[Request]:
        return [Request(f"{name}{i}", np.arange(3), Sampling(8), 1, replica=1) for i in range(3)]

    found = run(ask(dispatcher, pinned("a")))
    assert {completion.versions[0][1] for completion in found} == {1}
    for name in ("dies with it", "while it is away"):
        lost = run(ask(dispatcher, pinned(name)))
        assert all(isinstance(error, RequestLost) for error in lost)
        assert f"replica 1 is away, and request {name}0 is for it alone" in str(lost[0])
    assert dispatcher.outstanding == [0, 0]
    workers.holds[1].set()


def test_one_death_costs_one_restart_whenever_its_messages_are_heard_to_fail() -> None:
    came_back = threading.Event()
    workers, granting = Mortal(1, lambda rank, message: False), Granting(10)
    replicas = ReplicaSet(workers, granting, changed=came_back.set)  # type: ignore[arg-type]
    workers.holds[0].clear()
    error, life = WorkerLost("generator", 0, "generate", "killed by signal 9"), 0
    assert replicas.lost(0, life, error)
    assert replicas.lost(0, life, error)
    assert replicas.present() == set()
    workers.holds[0].set()
    assert came_back.wait(10)
    assert replicas.lost(0, life, error)  # late news of the first life
    assert replicas.present() == {0}
    assert len(granting.asked) == 1
    came_back.clear()
    assert replicas.lost(0, life + 1, error)
    assert came_back.wait(10)
    assert len(granting.asked) == 2


def test_what_waits_for_weights_that_a_replica_dies_of_goes_to_another_and_is_not_blamed() -> None:
    workers = Mortal(2, lambda rank, message: False)
    workers.holds[1].clear()  # it does not come back meanwhile
    dispatcher, granting, _ = made(workers)

    async def scene() -> list[Completion]:
        taking, asked = Answers([0, 1]), requests(4)
        dispatcher.hold(taking, {0: 0, 1: 0})
        answers = [asyncio.create_task(dispatcher.generate(request)) for request in asked]
        for _ in range(50):  # turns of the loop, until all are held
            await asyncio.sleep(0)
        taking.finish(1, None, WorkerLost("generator", 1, "weight_sync", "killed by signal 9"))
        taking.finish(0, None, None)
        return await asyncio.gather(*answers)

    assert [completion.id for completion in run(scene())] == [request.id for request in requests(4)]
    workers.holds[1].set()
    assert {rank for rank, _ in workers.messages} == {0}
    assert len(granting.asked) == 1
    assert granting.losses == {}


def test_what_names_the_only_replica_is_refused_while_that_is_away_whoever_else_waits_for_it() -> None:
    workers = Mortal(1, lambda rank, message: message == 0)
    workers.holds[0].clear()
    dispatcher, _, _ = made(workers)

    async def asked() -> list[Any]:
        waiting = asyncio.create_task(ask(dispatcher, requests(2)))
        while dispatcher.replicas.present():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        named = Request("named", np.arange(3), Sampling(8), 1, replica=0)
        with pytest.raises(RequestLost, match="replica 0 is away"):
            await asyncio.wait_for(dispatcher.generate(named), 2.0)
        workers.holds[0].set()
        return await waiting

    assert [completion.id for completion in run(asked())] == ["r0", "r1"]


def test_over_budget_all_that_wait_get_the_error_and_all_that_come_later() -> None:
    dispatcher, _, _ = made(Mortal(1, lambda rank, message: True), grants=1)
    found = run(ask(dispatcher, requests(3)))
    assert all(isinstance(error, WorkerError) and not isinstance(error, WorkerLost) for error in found)
    assert "generator rank 0 failed in generate: killed by signal 9; replicas were restarted as often" in str(found[0])
    (later,) = run(ask(dispatcher, requests(1)))
    assert str(later) == str(found[0])


def test_a_replica_that_cannot_be_started_again_fails_the_generator() -> None:
    class Ruined(Mortal):
        def restart(self, rank: int) -> None:
            raise WorkerError("generator", rank, "start", "OSError: no such model", details="Traceback")

    dispatcher, granting, _ = made(Ruined(1, lambda rank, message: True))
    (found,) = run(ask(dispatcher, requests(1)))
    assert isinstance(found, WorkerError)
    assert "failed in start: OSError: no such model" in str(found)
    assert len(granting.asked) == 1  # what raises is not tried again


class Poisoned(Mortal):
    """A rank dies of every message with a request whose id begins with `poison`."""

    async def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncIterator[Any]:
        if any(request.id.startswith("poison") for request in args[0]):
            self.messages.append((rank, [(request.id, request.seed) for request in args[0]]))
            await asyncio.sleep(0)
            raise WorkerLost("generator", rank, "generate", "killed by signal 11")
        async for outcomes in super().stream(rank, method, *args, phase=phase):
            yield outcomes


def prompts(*names: str) -> list[Request]:
    """Three samples of each prompt."""
    return [Request(f"{n}-{i}", np.arange(3), Sampling(8), 1, prefix=n) for n in names for i in range(3)]


@pytest.mark.parametrize("size", [1, 2])
def test_a_prompt_that_kills_replicas_is_given_up_and_those_beside_it_are_served(size: int) -> None:
    workers = Poisoned(size, lambda rank, message: False)
    dispatcher, granting, _ = made(workers)
    asked = prompts("a", "b", "poison", "c")
    found = dict(zip([request.id for request in asked], run(ask(dispatcher, asked)), strict=True))
    for name in ("poison-0", "poison-1", "poison-2"):
        assert isinstance(found[name], RequestLost)
        assert f"3 replicas were lost while they had request {name}; the last: generator rank" in str(found[name])
    assert {name for name, answer in found.items() if isinstance(answer, Completion)} == found.keys() - {
        "poison-0", "poison-1", "poison-2",
    }  # fmt: skip
    assert len(granting.asked) == MOST_LOSSES
    assert dispatcher.outstanding == [0] * size
    assert set(granting.losses) == {"poison-0", "poison-1", "poison-2"}
    (after,) = run(ask(dispatcher, requests(1)))
    assert after.id == "r0"


def test_where_all_begins_again_after_a_loss_the_prompt_that_kills_is_found_all_the_same() -> None:
    granting, asked = Granting(0), prompts("a", "poison", "b")

    def attempt() -> tuple[Poisoned, list[Any]]:
        workers = Poisoned(1, lambda rank, message: False)
        workers.alone = False
        dispatcher = RequestDispatcher(workers, ReplicaSet(workers, granting))  # type: ignore[arg-type]
        return workers, run(ask(dispatcher, asked))

    for _ in range(MOST_LOSSES - 1):
        workers, _ = attempt()
        assert [len(message) for _, message in workers.messages] == [9]  # as in a run that nothing disturbs
    workers, _ = attempt()
    assert [{id_[:-2] for id_, _ in message} for _, message in workers.messages] == [{"a"}, {"poison"}]
    _, found = attempt()
    lost = [request.id for request, answer in zip(asked, found, strict=True) if isinstance(answer, RequestLost)]
    assert lost == ["poison-0", "poison-1", "poison-2"]
    assert sum(isinstance(answer, Completion) for answer in found) == 6


def test_a_request_cancelled_while_it_waits_for_a_replica_is_never_sent() -> None:
    async def cancelling(dispatcher: RequestDispatcher) -> None:
        tasks = [asyncio.create_task(dispatcher.generate(request)) for request in requests(2)]
        while not granting.asked:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        workers.holds[0].set()
        await tasks[1]

    workers = Mortal(1, lambda rank, message: message == 0)
    workers.holds[0].clear()
    dispatcher, granting, _ = made(workers)
    run(cancelling(dispatcher))
    assert workers.messages[-1] == (0, [("r1", 101)])


def test_a_process_that_another_role_shares_is_not_replaced_here() -> None:
    workers = Mortal(1, lambda rank, message: True)
    workers.alone = False
    dispatcher, granting, _ = made(workers)
    (found,) = run(ask(dispatcher, requests(1)))
    assert isinstance(found, WorkerLost)
    assert not granting.asked


def test_a_replica_that_is_lost_after_it_was_chosen_is_not_asked_before_it_has_weights() -> None:
    workers = Mortal(1, lambda rank, message: False)
    workers.holds[0].clear()
    dispatcher, _, received = made(workers)

    async def scene() -> Completion:
        asked = asyncio.create_task(dispatcher.generate(requests(1)[0]))
        while dispatcher.outstanding == [0]:
            await asyncio.sleep(0)
        assert dispatcher.replicas.lost(0, 0, WorkerLost("generator", 0, "weight_sync", "killed by signal 9"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert workers.messages == []
        assert dispatcher.outstanding == [0]
        workers.holds[0].set()
        completion = await asked
        assert received == [(0, LINK)]
        return completion

    assert run(scene()).id == "r0"
