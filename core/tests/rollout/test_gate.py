import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from whet.interfaces.clock import stopped_clock
from whet.rollout.gate import Gate


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_shut_it_waits_for_those_inside_and_holds_back_all_others() -> None:
    async def scene() -> list[str]:
        gate, leave, said = Gate(), asyncio.Event(), list[str]()

        async def visitor(name: str) -> None:
            async with gate:
                said.append(f"{name} in")
                await leave.wait()
            said.append(f"{name} out")

        first = asyncio.create_task(visitor("first"))
        await asyncio.sleep(0)
        shutting = asyncio.create_task(gate.shut())
        await asyncio.sleep(0)
        second = asyncio.create_task(visitor("second"))
        await asyncio.sleep(0.01)
        assert not shutting.done()
        leave.set()
        await shutting
        said.append("alone")
        await asyncio.sleep(0.01)
        gate.open()
        gate.open()
        await asyncio.gather(first, second)
        return said

    assert run(scene()) == ["first in", "first out", "alone", "second in", "second out"]


def test_who_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    async def scene() -> None:
        gate = Gate()
        await gate.shut()
        waiting = asyncio.create_task(gate.__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        gate.open()
        await gate.shut()

    run(scene())


def test_while_it_is_shut_no_time_passes() -> None:
    async def scene() -> list[str]:
        gate, ended = Gate(), list[str]()

        async def work(seconds: float) -> None:
            try:
                async with gate.time_limit(0.1) as limit:
                    await asyncio.sleep(seconds)
                ended.append("in time")
            except TimeoutError:
                assert limit.expired()
                ended.append("too late")

        before = asyncio.create_task(work(0.25))
        await asyncio.sleep(0)
        await gate.shut()
        during = asyncio.create_task(work(60))
        await asyncio.sleep(0.3)
        assert ended == ["in time"]
        gate.open()
        await asyncio.gather(before, during)
        return ended

    assert run(scene()) == ["in time", "too late"]


def test_an_open_gate_limits_time() -> None:
    async def scene() -> None:
        async with Gate().time_limit(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        run(scene())


def test_while_an_episode_waits_for_its_turn_no_time_passes() -> None:
    async def scene() -> list[str]:
        gate, ended = Gate(), list[str]()

        async def work(waits: float, works: float) -> None:
            try:
                async with gate.time_limit(0.2):
                    with stopped_clock():
                        with stopped_clock():
                            await asyncio.sleep(waits / 2)
                        await asyncio.sleep(waits / 2)
                    await asyncio.sleep(works)
                ended.append("in time")
            except TimeoutError:
                ended.append("too late")

        await work(0.4, 0.0)
        await work(0.0, 60.0)
        shut = asyncio.create_task(work(0.1, 0.0))  # the gate is opened after the wait: two reasons to stop overlap
        await asyncio.sleep(0)
        await gate.shut()
        await asyncio.sleep(0.3)
        gate.open()
        await shut
        return ended

    assert run(scene()) == ["in time", "too late", "in time"]


def test_outside_of_an_episode_and_after_it_a_clock_stops_nothing() -> None:
    async def scene() -> None:
        with stopped_clock():
            pass
        gate, leave = Gate(), asyncio.Event()

        async def lingers() -> None:
            with stopped_clock():
                await leave.wait()

        async with gate.time_limit(60):
            left_behind = asyncio.create_task(lingers())
            await asyncio.sleep(0)
            threads = await asyncio.gather(asyncio.to_thread(asyncio.run, lingering_elsewhere()))
            assert threads == ["elsewhere"]
            await asyncio.to_thread(stopping)
        leave.set()
        await left_behind

    def stopping() -> None:
        with stopped_clock():
            pass

    async def lingering_elsewhere() -> str:
        with stopped_clock():
            return "elsewhere"

    run(scene())
