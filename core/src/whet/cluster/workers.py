"""The worker objects of one spawn, on connections to their processes, whatever started those.

    ConnectedWorkers ── call, scatter, stream ──> one `Connection` for each rank, shared with other roles

Numbered messages go to `whet.cluster.host`; an answer whose call is over is dropped. Whatever ends a call (an
exception, a death, a deadline) ends it at once for all ranks, with a `WorkerError`.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from attrs import frozen

from whet.cluster.connection import Call, Connection, HostProcess
from whet.cluster.wire import encode
from whet.errors import WorkerError, WorkerLost

_PATIENCE_FOR_A_DEATH = 1.0
BUSY_GRACE_SECONDS = 0.3
"""Who closes in the middle of a call does not want to wait for it."""


class Gathering:
    """A call under way on several ranks: done when all have answered or one has failed."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._future: Future[list[Any]] = Future()
        self._death: Future[WorkerLost | None] = Future()
        """Of a rank that did not raise but was lost; None: all ranks have answered, and none was."""

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's answer; what comes after a failure is dropped, but for a death."""
        with self._lock:
            self._results[rank] = result
            self._missing -= 1
            if not self._death.done():
                if isinstance(error, WorkerLost):
                    self._death.set_result(error)
                elif not self._missing:
                    self._death.set_result(None)
            if self._future.done():
                return
            if error is not None:
                self._future.set_exception(error)
            elif not self._missing:
                self._future.set_result(self._results)

    def result(self) -> list[Any]:
        """Wait for the results, in rank order; raises `WorkerError`.

        Where a rank dies, those that talk to it raise, often before its death is known here: it is the one to blame.
        """
        try:
            return self._future.result()
        except WorkerError as raised:
            death = None
            if not isinstance(raised, WorkerLost):
                with suppress(TimeoutError):
                    death = self._death.result(_PATIENCE_FOR_A_DEATH)
            if death is None:
                raise
            raise death from raised

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()


@frozen
class Terms:
    """What the calls of a cluster have in common."""

    numbers: Iterator[int]
    """Of the messages; none is given twice."""
    deadline: Callable[[str], float]
    """Seconds that a phase may take."""
    grace_seconds: float
    """How long closing waits before it kills."""


class ConnectedWorkers:
    """The worker objects of one spawn."""

    def __init__(self, role: str, slot: int, connect: Sequence[Callable[[], Connection]], terms: Terms) -> None:
        """Take a function for each rank that gives its process, a fresh one where the last is no longer of use."""
        self.role, self.size = role, len(connect)
        self._slot, self._connect, self._terms = slot, list(connect), terms
        self._connections = [process() for process in connect]
        self._building: list[dict[str, Any]] = []
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
        message = {"do": "call", "slot": self._slot, "method": method, "args": args}
        return self._ask(range(self.size), [message] * self.size, phase or method, timeout_seconds)

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Gathering:
        """Start a call on one rank; its result is a list of one."""
        message = {"do": "call", "slot": self._slot, "method": method, "args": args}
        return self._ask([rank], [message], phase or method, timeout_seconds)

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
        messages = [{"do": "call", "slot": self._slot, "method": method, "args": tuple(args)} for args in arguments]
        return self._ask(range(self.size), messages, phase or method, timeout_seconds).result()

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Iterate an async-generator method of one rank, in the process that it has now."""
        return self._stream(self._connections[rank], rank, method, args, phase or method)

    async def _stream(
        self, connection: Connection, rank: int, method: str, args: tuple[Any, ...], phase: str
    ) -> AsyncGenerator[Any, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]]()

        def deliver(kind: str, value: Any) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, (kind, value))
            except RuntimeError:  # the loop was closed, and nobody waits any more
                connection.drop(number)

        def finish(result: Any, error: WorkerError | None) -> None:
            deliver("end" if error is None else "failed", error)

        number = next(self._terms.numbers)
        message = {"do": "stream", "number": number, "slot": self._slot, "method": method, "args": args}
        buffers = encode(message)
        missed = partial(_missed, [connection])
        connection.ask(number, buffers, self._new_call(rank, phase, None, missed, finish, partial(deliver, "part")))
        ended = False
        try:
            while True:
                kind, value = await arrived.get()
                ended = kind != "part"
                if kind == "failed":
                    raise value
                if ended:
                    return
                yield value
        finally:
            if not ended:
                connection.drop(number)
                connection.tell({"do": "cancel", "number": number})

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

    def _ask(
        self, ranks: Sequence[int], messages: Sequence[dict[str, Any]], phase: str, timeout_seconds: float | None
    ) -> Gathering:
        """Send one message to each of some ranks."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        gathering, number = Gathering(len(ranks)), next(self._terms.numbers)
        same = all(message is messages[0] for message in messages)
        sent = [encode({"number": number, **message}) for message in (messages[:1] if same else messages)]
        asked = [self._connections[rank] for rank in ranks]
        for place, (rank, connection) in enumerate(zip(ranks, asked, strict=True)):
            done, missed = partial(gathering.finish, place), partial(_missed, asked)
            call = self._new_call(rank, phase, timeout_seconds, missed, done)
            connection.ask(number, sent[0 if same else place], call)
        return gathering

    def _new_call(
        self, rank: int, phase: str, timeout_seconds: float | None, missed: Any, done: Any, part: Any = None
    ) -> Call:
        seconds = self._terms.deadline(phase) if timeout_seconds is None else timeout_seconds
        return Call(self.role, rank, phase, seconds, done, part or (lambda item: None), missed)


def _missed(asked: Sequence[Connection], error: WorkerError) -> None:
    """End the processes of all that were asked: whoever misses a deadline is not trusted again.

    Theirs, and not their ranks': those may have been given another process meanwhile.
    """
    for connection in asked:
        connection.kill(error)
