"""The streams of several ranks, merged into one. Each rank's stream uses the connection of the rank's process.

Streams ── stream ──> Connection, for each rank
   ^─── Mailbox <── part, part, done ── Connection
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, MutableMapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from whet.errors import WhetError
from whet.interfaces.workers import Heard
from whet.runtime.call import Call, RpcSettings
from whet.runtime.connection import Connection
from whet.runtime.wire import WireError, encode, encode_calls

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


class Streams:
    """One call of an async-generator method on some of the ranks."""

    def __init__(
        self, role: str, slot: int, method: str, arguments: Mapping[int, tuple[Any, ...]], phase: str,
        connections: Mapping[int, Connection], settings: RpcSettings,
    ) -> None:  # fmt: skip
        """Take the arguments and the connection of each rank. No message is sent before `listen`."""
        self._role, self._slot, self._method, self._arguments, self._phase = role, slot, method, arguments, phase
        self._connections, self._settings = connections, settings
        self._seconds = settings.deadline(phase)
        self._number = 0
        self._arrived: asyncio.Queue[Heard] = asyncio.Queue()

    async def listen(
        self, mailboxes: MutableMapping[asyncio.AbstractEventLoop, Mailbox]
    ) -> AsyncGenerator[Heard, None]:
        """Start the streams, and yield what arrives until all have ended. Closing this cancels the unfinished ones."""
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailboxes.setdefault(self._loop, Mailbox())
        self._number = next(self._settings.numbers)
        left = set(self._connections)
        try:
            self._ask()
            while left:
                heard = await self._arrived.get()
                if heard.over:
                    left.discard(heard.rank)
                yield heard
        finally:
            self._cancel(left)

    def _ask(self) -> None:
        head = {"do": "stream", "number": self._number, "slot": self._slot, "method": self._method}
        messages = encode_calls(head, [self._arguments[rank] for rank in self._connections])
        for (rank, connection), message in zip(self._connections.items(), messages, strict=True):
            if isinstance(message, WireError):
                self._end(rank, None, message)
            else:
                connection.ask(self._number, message, self._call(rank))

    def _call(self, rank: int) -> Call:
        part, end, missed = partial(self._part, rank), partial(self._end, rank), self._connections[rank].kill
        return Call(self._role, rank, self._phase, self._seconds, end, part, missed)

    def _part(self, rank: int, item: Any) -> None:
        self._deliver(Heard(rank, (item,)))

    def _end(self, rank: int, result: Any, error: WhetError | None) -> None:
        self._deliver(Heard(rank, (), True, error))

    def _deliver(self, heard: Heard) -> None:
        try:
            self._mailbox.put(self._loop, self._arrived, heard)
        except RuntimeError:  # the loop is closed, so no caller waits for the item
            self._connections[heard.rank].drop(self._number)

    def _cancel(self, ranks: Collection[int]) -> None:
        buffers = encode({"do": "cancel", "number": self._number}) if ranks else []
        for rank in ranks:
            self._connections[rank].drop(self._number)
            self._connections[rank].send(buffers)


async def one_stream(streams: AsyncGenerator[Heard, None]) -> AsyncGenerator[Any, None]:
    """Yield the items of the streams of one rank. Raises the error that ended its stream."""
    async with aclosing(streams):
        async for heard in streams:
            for item in heard.items:
                yield item
            if heard.error is not None:
                raise heard.error
