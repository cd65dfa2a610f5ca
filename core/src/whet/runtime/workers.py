"""The worker objects of one spawn, on connections to their processes, whatever started those.

    ConnectedWorkers ── call, scatter, stream ──> one `Connection` for each rank, shared with other roles

Numbered messages go to `worker_process`; an answer whose call is over is dropped. Whatever ends a call of all
ranks (an exception, a death, a deadline) ends it at once for all of them, with a `WorkerError`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from whet.data import metrics
from whet.data.metrics import Metric
from whet.errors import WorkerError
from whet.interfaces.workers import Heard
from whet.runtime.call import Call, HostProcess, Terms
from whet.runtime.channel import frame
from whet.runtime.connection import Connection
from whet.runtime.futures import Answers, Gathering
from whet.runtime.streams import Mailbox, Streams, one_stream
from whet.runtime.wire import encode

BUSY_GRACE_SECONDS = 0.3
"""Who closes in the middle of a call does not want to wait for it."""


class ConnectedWorkers:
    """The worker objects of one spawn."""

    def __init__(self, role: str, slot: int, connect: Sequence[Callable[[], Connection]], terms: Terms) -> None:
        """Take a function for each rank that gives its process, a fresh one where the last is no longer of use."""
        self.role, self.size = role, len(connect)
        self._slot, self._connect, self._terms = slot, list(connect), terms
        self._connections = [process() for process in connect]
        self._building: list[dict[str, Any]] = []
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._closed = False
        for connection in self._connections:
            connection.enter(slot)

    @property
    def processes(self) -> list[HostProcess]:
        """The process of each rank."""
        return [connection.process for connection in self._connections]

    def build(self, messages: Sequence[dict[str, Any]]) -> None:
        """Have one worker built on each rank, and wait for them under the deadline `start`."""
        self._building = list(messages)
        self._ask(range(self.size), messages, "start", None).result()

    @property
    def alone(self) -> bool:
        """Whether no other role lives in their processes, so that one can be restarted by itself."""
        return all(connection.houses_only(self._slot) for connection in self._connections)

    def restart(self, rank: int) -> None:
        """End the process of one rank and start another, with the worker built anew."""
        if self._closed or not self.alone:
            why = "the workers are closed" if self._closed else "another role lives in its process"
            raise WorkerError(self.role, rank, "start", why)
        lost = self._connections[rank]
        lost.kill(WorkerError(self.role, rank, "start", "it is started anew"))
        lost.end(time.monotonic())
        lost.exit(self._slot)
        self._connections[rank] = self._connect[rank]()
        self._connections[rank].enter(self._slot)
        self._ask([rank], [self._building[rank]], "start", None).result()

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call on every rank with the same arguments and wait."""
        return self.start(method, *args, phase=phase, timeout_seconds=timeout_seconds).result()

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> Gathering:
        """Start a call on every rank. Leave the arguments' arrays as they are until it is done."""
        return self._ask(range(self.size), [self._message(method, args)], phase or method, timeout_seconds)

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Gathering:
        """Start a call on one rank; its result is a list of one."""
        return self._ask([rank], [self._message(method, args)], phase or method, timeout_seconds)

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Answers:
        """Start a call on each of these ranks; no rank's result depends on another."""
        number, phase, seconds = self._terms_of(phase or method, timeout_seconds)
        answers, buffers = Answers(ranks), frame(encode({"number": number, **self._message(method, args)}))
        for rank, connection in {rank: self._connections[rank] for rank in ranks}.items():
            done = partial(answers.finish, rank)
            connection.ask(number, buffers, Call(self.role, rank, phase, seconds, done, missed=connection.kill))
        return answers

    def scatter(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call rank i with arguments[i] and wait."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        messages = [self._message(method, row) for row in arguments]
        return self._ask(range(self.size), messages, phase or method, timeout_seconds).result()

    def scatter_metrics(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> dict[str, Metric]:
        """Call rank i with arguments[i], wait, and merge the metrics that all give."""
        return metrics.merge(self.scatter(method, arguments, phase=phase, timeout_seconds=timeout_seconds))

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Iterate an async-generator method of one rank, in the process that it has now."""
        return one_stream(self._streams({rank: args}, method, phase))

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncGenerator[Heard, None]:
        """Iterate an async-generator method of several ranks, each with a list of its own."""
        return self._streams({rank: (share,) for rank, share in shares.items()}, method, phase)

    def _streams(self, asked: Mapping[int, tuple[Any, ...]], method: str, phase: str) -> AsyncGenerator[Heard, None]:
        connections = {rank: self._connections[rank] for rank in asked}
        asking = Streams(self.role, self._slot, method, asked, phase or method, connections, self._terms)
        return asking.listen(self._mailboxes)

    def close(self) -> None:
        """Let the workers close, then end their processes where no other role lives in them."""
        if self._closed:
            return
        self._closed = True
        busy = any(connection.busy(self.role) for connection in self._connections)
        grace = BUSY_GRACE_SECONDS if busy else self._terms.grace_seconds
        deadline, closing, number = time.monotonic() + grace, Gathering(self.size), next(self._terms.numbers)
        buffers = encode({"do": "close", "number": number, "slot": self._slot})
        for rank, connection in enumerate(self._connections):
            connection.ask(number, buffers, Call(self.role, rank, "close", grace, partial(closing.finish, rank)))
        with suppress(WorkerError):  # what a worker raised is in its log
            closing.result()
        ending = [connection for connection in self._connections if connection.exit(self._slot)]
        for connection in ending:
            connection.end(deadline)

    def _message(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"do": "call", "slot": self._slot, "method": method, "args": tuple(args)}

    def _ask(
        self, ranks: Sequence[int], messages: Sequence[dict[str, Any]], phase: str, timeout_seconds: float | None
    ) -> Gathering:
        """Send a message to each of these ranks, or one that all have in common, which is encoded once."""
        number, phase, seconds = self._terms_of(phase, timeout_seconds)
        framed = [frame(encode({"number": number, **message})) for message in messages]
        asked = [self._connections[rank] for rank in ranks]
        gathering, missed = Gathering(len(ranks)), partial(_missed, asked)
        for place, (rank, connection) in enumerate(zip(ranks, asked, strict=True)):
            done = partial(gathering.finish, place)
            call = Call(self.role, rank, phase, seconds, done, missed=missed)
            connection.ask(number, framed[place % len(framed)], call)
        return gathering

    def _terms_of(self, phase: str, timeout_seconds: float | None) -> tuple[int, str, float]:
        """Return the number of a call, its phase, and its deadline in seconds. Raises `WorkerError` once closed."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        seconds = self._terms.deadline(phase) if timeout_seconds is None else timeout_seconds
        return next(self._terms.numbers), phase, seconds


def _missed(asked: Sequence[Connection], error: WorkerError) -> None:
    """End the processes of all that were asked: whoever misses a deadline is not trusted again.

    Theirs, and not their ranks': those may have been given another process meanwhile.
    """
    for connection in asked:
        connection.kill(error)
