"""Streams of several ranks: asked in few messages, heard over each process's own connection.

    Streams ── relay ──> Leader ── stream ──> Sibling, ...     where several ranks of a branch are asked
       ^  └── stream ──> Connection                            where one is
       └── part, part, last ── Connection                      whoever asked

A leader says who has begun. Where it is lost before that, all are asked again by the driver; who has begun already
takes no notice, so that no stream begins twice.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, Final

from whet.cluster.branch import Branch, Deadline, Relayed
from whet.cluster.call import Call, Terms
from whet.cluster.connection import Connection
from whet.cluster.slices import Heard
from whet.cluster.wire import Buffer, encode
from whet.errors import WorkerError

_PAUSE_SECONDS: Final = 0.005
"""Between two deliveries to an event loop: it is woken no oftener, however many answer. The first comes at once."""


class Mailbox:
    """Brings what a thread has for the streams of an event loop to it: all that has come, in one turn of the loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._lock = threading.Lock()
        self._awaited = False
        """Whether the loop will look by itself."""

    def put(self, loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[Any]", item: Any) -> None:
        """Raises `RuntimeError` where the loop is closed."""
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
    """One async-generator method, called on some ranks."""

    def __init__(
        self, role: str, slot: int, method: str, arguments: Mapping[int, tuple[Any, ...]], phase: str,
        connections: Mapping[int, Connection], terms: Terms,
    ) -> None:  # fmt: skip
        """Nothing is asked before `listen`. Each rank is asked in the process that is given for it."""
        self._role, self._slot, self._method, self._arguments, self._phase = role, slot, method, arguments, phase
        self._connections, self._terms = connections, terms
        self._seconds = terms.deadline(phase)
        self._number = 0
        self._arrived: asyncio.Queue[Heard] = asyncio.Queue()

    async def listen(
        self, branches: Sequence[Branch], mailboxes: MutableMapping[asyncio.AbstractEventLoop, Mailbox]
    ) -> AsyncGenerator[Heard, None]:
        """Ask, and give what comes until all streams are over. What is left when this is closed is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._mailbox = mailboxes.setdefault(self._loop, Mailbox())
        self._number = next(self._terms.numbers)
        left = set(self._connections)
        try:
            self._ask(branches)
            while left:
                heard = await self._arrived.get()
                if heard.over:
                    left.discard(heard.rank)
                yield heard
        finally:
            self._cancel(left)

    def _ask(self, branches: Sequence[Branch]) -> None:
        alone = dict(self._connections)
        for branch in branches:
            share = [rank for rank, connection in alone.items() if branch.reaches(rank, connection)]
            if len(share) > 1 or (share and alone[share[0]].begins):  # in the order in which they were asked
                self._relay(branch, share)
                for rank in share:
                    del alone[rank]
        for rank, connection in alone.items():
            connection.ask(self._number, self._message(rank), self._call(rank))

    def _relay(self, branch: Branch, ranks: Sequence[int]) -> None:
        """Ask ranks of a branch through its leader. Until they have begun, that is what has a deadline."""
        buffers, number = self._relayed(ranks)
        waiting = [rank for rank in ranks if self._connections[rank].expect(self._number, self._call(rank, math.inf))]
        begins = Relayed(
            self._phase, self._seconds, Deadline(self._seconds), {rank: rank for rank in waiting},
            answered=self._begun, failed=lambda rank, result, error: None, missed=Connection.kill,
            orphaned=self._send,
        )  # fmt: skip
        if len(waiting) < len(ranks) or not branch.ask(number, buffers, begins):
            self._send(waiting)

    def _relayed(self, ranks: Sequence[int]) -> tuple[list[Buffer], int]:
        """Give the message to a leader and its number: the lists of all ranks as one, which crosses at less cost."""
        shares, number = [self._arguments[rank][0] for rank in ranks], next(self._terms.numbers)
        head = {"do": "relay", "number": number, "slot": self._slot, "method": self._method, "stream": self._number}
        lists = {"list": list(chain.from_iterable(shares)), "lengths": list(map(len, shares))}
        return encode({**head, "ranks": list(ranks), "merge": False, **lists}), number

    def _message(self, rank: int) -> list[Buffer]:
        head = {"do": "stream", "number": self._number, "slot": self._slot, "method": self._method}
        return encode({**head, "args": self._arguments[rank]})

    def _send(self, ranks: Sequence[int]) -> None:
        """Ask ranks that have not begun, as far as is known, without a leader."""
        for rank in ranks:
            if self._connections[rank].renew(self._number):
                self._connections[rank].send(self._message(rank))

    def _begun(self, ranks: Sequence[int], values: Sequence[Any]) -> None:
        for rank in ranks:
            self._connections[rank].renew(self._number)

    def _call(self, rank: int, expires: float = 0.0) -> Call:
        missed = self._connections[rank].kill
        call = Call(
            self._role, rank, self._phase, self._seconds, partial(self._end, rank), partial(self._part, rank), missed
        )
        call.expires = expires or call.expires
        return call

    def _part(self, rank: int, item: Any, last: bool) -> None:
        self._deliver(Heard(rank, (item,), last))

    def _end(self, rank: int, result: Any, error: WorkerError | None) -> None:
        self._deliver(Heard(rank, (), True, error))

    def _deliver(self, heard: Heard) -> None:
        try:
            self._mailbox.put(self._loop, self._arrived, heard)
        except RuntimeError:  # the loop was closed, and nobody waits any more
            self._connections[heard.rank].drop(self._number)

    def _cancel(self, ranks: Collection[int]) -> None:
        buffers = encode({"do": "cancel", "number": self._number}) if ranks else []
        for rank in ranks:
            self._connections[rank].drop(self._number)
            self._connections[rank].send(buffers)


async def one_stream(streams: AsyncGenerator[Heard, None]) -> AsyncGenerator[Any, None]:
    """Give the items of the streams of one rank; raises what ended it."""
    async with aclosing(streams):
        async for heard in streams:
            for item in heard.items:
                yield item
            if heard.error is not None:
                raise heard.error
