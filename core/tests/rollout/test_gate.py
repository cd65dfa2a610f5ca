import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

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
