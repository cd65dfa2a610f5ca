"""The driver's handle of the worker objects of one spawn. It uses connections to their processes.

    ConnectedWorkers ── call, scatter, stream ──> one `Connection` for each rank, shared with other roles

The handle sends numbered messages to `worker_process`, and drops an answer whose call has ended. An exception, the
death of a process or a missed deadline on one rank ends a call of all ranks at once, with a `WorkerError`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from whet.errors import WorkerError
from whet.interfaces.workers import Heard
from whet.runtime.call import Call, HostProcess, RpcSettings
from whet.runtime.channel import frame
from whet.runtime.connection import Connection
from whet.runtime.futures import Answers, GatheredFuture
from whet.runtime.streams import Mailbox, Streams, one_stream
from whet.runtime.wire import encode

BUSY_GRACE_SECONDS = 0.3
"""Seconds that `close` allows the workers while a call is under way: its caller does not want to wait for the call."""


class ConnectedWorkers:
    """The driver's handle of the worker objects of one spawn."""

    def __init__(
        self, role: str, slot: int, connect: Sequence[Callable[[], Connection]], settings: RpcSettings
    ) -> None:
        """Take a function for each rank that returns a connection to its process.

        Where the rank's last process is lost, the function starts a new one.
        """
        self.role, self.size = role, len(connect)
        self._slot, self._connect, self._settings = slot, list(connect), settings
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
        """Build one worker on each rank, and wait until all are built, with the deadline of the phase `start`."""
        self._building = list(messages)
        self._ask(range(self.size), messages, "start", None).result()

    @property
    def alone(self) -> bool:
        """Whether no other role has workers in these processes, so that one process can be restarted."""
        return all(connection.houses_only(self._slot) for connection in self._connections)

    def restart(self, rank: int) -> None:
        """End the process of one rank, start a new process, and build the worker again in it."""
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
        """Call a method on every rank with the same arguments, wait, and return the results by rank."""
        return self.start(method, *args, phase=phase, timeout_seconds=timeout_seconds).result()

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> GatheredFuture:
        """Start a call on every rank and return it. Do not change arrays in its arguments before it is done."""
        return self._ask(range(self.size), [self._message(method, args)], phase or method, timeout_seconds)

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> GatheredFuture:
        """Start a call on one rank and return it. Its result is a list with one item."""
        return self._ask([rank], [self._message(method, args)], phase or method, timeout_seconds)

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Answers:
        """Start a separate call on each of these ranks and return them. An error of one does not end the others."""
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
        """Call a method on rank i with arguments[i], wait, and return the results by rank."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        messages = [self._message(method, row) for row in arguments]
        return self._ask(range(self.size), messages, phase or method, timeout_seconds).result()

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Yield the items of an async-generator method of one rank, from the process that the rank has now."""
        return one_stream(self._streams({rank: args}, method, phase))

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncGenerator[Heard, None]:
        """Yield the items of an async-generator method of several ranks. Each rank gets its own list as argument."""
        return self._streams({rank: (share,) for rank, share in shares.items()}, method, phase)

    def _streams(self, asked: Mapping[int, tuple[Any, ...]], method: str, phase: str) -> AsyncGenerator[Heard, None]:
        connections = {rank: self._connections[rank] for rank in asked}
        asking = Streams(self.role, self._slot, method, asked, phase or method, connections, self._settings)
        return asking.listen(self._mailboxes)

    def close(self) -> None:
        """Close the workers, then end their processes where no other role has workers in them."""
        if self._closed:
            return
        self._closed = True
        busy = any(connection.busy(self.role) for connection in self._connections)
        grace = BUSY_GRACE_SECONDS if busy else self._settings.grace_seconds
        deadline, closing, number = time.monotonic() + grace, GatheredFuture(self.size), next(self._settings.numbers)
        buffers = encode({"do": "close", "number": number, "slot": self._slot})
        for rank, connection in enumerate(self._connections):
            connection.ask(number, buffers, Call(self.role, rank, "close", grace, partial(closing.finish, rank)))
        with suppress(WorkerError):  # an error of a worker is in its log
            closing.result()
        ending = [connection for connection in self._connections if connection.exit(self._slot)]
        for connection in ending:
            connection.end(deadline)

    def _message(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"do": "call", "slot": self._slot, "method": method, "args": tuple(args)}

    def _ask(
        self, ranks: Sequence[int], messages: Sequence[dict[str, Any]], phase: str, timeout_seconds: float | None
    ) -> GatheredFuture:
        """Send each rank its message, or send all ranks one message, which is encoded once. Return the call."""
        number, phase, seconds = self._terms_of(phase, timeout_seconds)
        framed = [frame(encode({"number": number, **message})) for message in messages]
        asked = [self._connections[rank] for rank in ranks]
        gathering, missed = GatheredFuture(len(ranks)), partial(_missed, asked)
        for place, (rank, connection) in enumerate(zip(ranks, asked, strict=True)):
            done = partial(gathering.finish, place)
            call = Call(self.role, rank, phase, seconds, done, missed=missed)
            connection.ask(number, framed[place % len(framed)], call)
        return gathering

    def _terms_of(self, phase: str, timeout_seconds: float | None) -> tuple[int, str, float]:
        """Return the number of a call, its phase, and its deadline in seconds. Raises `WorkerError` once closed."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        seconds = self._settings.deadline(phase) if timeout_seconds is None else timeout_seconds
        return next(self._settings.numbers), phase, seconds


def _missed(asked: Sequence[Connection], error: WorkerError) -> None:
    """Kill the processes of all ranks of a call that missed its deadline: they may be stuck, so none is used again.

    The call's own connections are used, because a rank may have a new process by now.
    """
    for connection in asked:
        connection.kill(error)
