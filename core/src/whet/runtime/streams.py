"""The streams of several ranks, merged into one. Each rank's stream uses the connection of the rank's process.

streams ── stream ──> Connection, for each rank
   ^─── Mailbox <── part, part, done ── Connection
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from whet.errors import WhetError
from whet.interfaces.workers import Heard
from whet.runtime.connection import Call, Connection
from whet.runtime.wire import WireError, encode

_PAUSE_SECONDS: Final = 0.005
"""Least time between two deliveries to an event loop, however many ranks answer. The first delivery is immediate."""


class Mailbox:
    """Brings items from other threads to the queues of one event loop: all waiting items in one turn of the loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._lock = threading.Lock()
        self._awaited = False
        """Whether `_empty` is scheduled on the loop already."""

    def put(self, loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[Any]", item: Any) -> None:
        """Put an item into a queue of the loop, from any thread. Raises `RuntimeError` where the loop is closed."""
        with self._lock:
            if loop.is_closed():
                raise RuntimeError("the loop is closed")
            if not self._awaited:
                loop.call_soon_threadsafe(self._empty)
                self._awaited = True
            self._items.append((queue, item))

    def _empty(self) -> None:
        with self._lock:
            items, self._items, self._awaited = self._items, deque(), bool(self._items)
        if items:
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._empty)
        for queue, item in items:
            queue.put_nowait(item)


async def streams(
    role: str, phase: str, seconds: float, number: int, messages: Mapping[int, Mapping[str, Any]],
    connections: Mapping[int, Connection], mailboxes: MutableMapping[asyncio.AbstractEventLoop, Mailbox],
) -> AsyncGenerator[Heard, None]:  # fmt: skip
    """Send each rank its message, and yield what arrives until all streams have ended.

    Nothing is sent before the first item is requested. Closing this cancels the unfinished streams. A rank whose
    message cannot be sent fails alone. `seconds` is the deadline of each item.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Heard]()
    mailbox, left = mailboxes.setdefault(loop, Mailbox()), set(connections)

    def deliver(heard: Heard) -> None:
        try:
            mailbox.put(loop, arrived, heard)
        except RuntimeError:  # the loop is closed, so no caller waits for the item
            connections[heard.rank].drop(number)

    def part(rank: int, item: Any) -> None:
        deliver(Heard(rank, (item,)))

    def end(rank: int, result: Any, error: WhetError | None) -> None:
        deliver(Heard(rank, (), True, error))

    try:
        for rank, connection in connections.items():
            call = Call(role, rank, phase, seconds, partial(end, rank), partial(part, rank), connection.kill)
            try:
                connection.ask(number, encode({"number": number, **messages[rank]}), call)
            except WireError as error:
                end(rank, None, error)
        while left:
            heard = await arrived.get()
            if heard.over:
                left.discard(heard.rank)
            yield heard
    finally:
        for rank in left:
            connections[rank].drop(number)
            connections[rank].tell({"do": "cancel", "number": number})


async def one_stream(streams: AsyncGenerator[Heard, None]) -> AsyncGenerator[Any, None]:
    """Yield the items of the streams of one rank. Raises the error that ended its stream."""
    async with aclosing(streams):
        async for heard in streams:
            for item in heard.items:
                yield item
            if heard.error is not None:
                raise heard.error
