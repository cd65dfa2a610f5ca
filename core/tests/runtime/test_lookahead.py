"""Whether an async generator has more is found out as far as that needs no waiting."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from whet.runtime.lookahead import END, next_item


async def counted(numbers: int, waits: tuple[int, ...] = ()) -> AsyncGenerator[int, None]:
    for number in range(numbers):
        if number in waits:
            await asyncio.sleep(0.01)
        yield number
    if numbers in waits:
        await asyncio.sleep(0.01)


async def read(items: AsyncGenerator[Any, None]) -> list[Any]:
    """What was read, with `...` where it was waited for what comes next."""
    found: list[Any] = []
    async with aclosing(items):
        while (item := await next_item(items, lambda: found.append(...))) is not END:
            found.append(item)
    return found


def test_what_is_at_hand_is_given_without_waiting_and_so_is_the_end() -> None:
    assert asyncio.run(read(counted(3))) == [0, 1, 2]
    assert asyncio.run(read(counted(0))) == []
    assert asyncio.run(read(counted(3, waits=(1, 3)))) == [0, ..., 1, 2, ...]


def test_a_generator_that_waits_more_than_once_is_waited_for_once() -> None:
    async def slow() -> AsyncGenerator[int, None]:
        for _ in range(3):
            await asyncio.sleep(0.001)
        yield 1

    assert asyncio.run(read(slow())) == [..., 1]


def test_what_a_generator_raises_is_raised() -> None:
    async def failing() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.sleep(0)
        raise ValueError("as told")

    with pytest.raises(ValueError, match="as told"):
        asyncio.run(read(failing()))


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_generator_gets_a_cancellation_and_an_error_of_the_one_who_waits(cancelled: bool) -> None:
    seen: list[str] = []

    async def patient() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(10)
            yield 1
        except BaseException as error:
            seen.append(type(error).__name__)
            await asyncio.sleep(0)  # it may take its time
            raise
        finally:
            seen.append("left")

    def wait() -> None:
        if not cancelled:
            raise KeyError("full")

    async def run() -> None:
        items = patient()
        async with aclosing(items):
            await next_item(items, wait)

    async def cancel() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError if cancelled else KeyError):
        asyncio.run(cancel())
    assert seen == ["CancelledError" if cancelled else "KeyError", "left"]
