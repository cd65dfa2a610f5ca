"""The driver's handle of the worker objects of one spawn, and the calls that are under way on them.

    ConnectedWorkers ── Call, frame(encode(message)) ──> Connection, of each rank ── Line ──> WorkerProcess ──> method
    GatheredFuture   <── Call.done(result, error) ───── Connection <── Line, on the thread of the traffic ──────┘

Messages are numbered. Roles that share a process share its `Connection`. An exception, the death of a process or a
missed deadline on one rank ends a call of all ranks at once, with a `WorkerError`.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from attrs import frozen

from whet.errors import WorkerError, WorkerLost
from whet.interfaces.workers import Heard
from whet.runtime.channel import frame
from whet.runtime.connection import Call, Connection, end_all
from whet.runtime.hosts import HostProcess
from whet.runtime.streams import Mailbox, one_stream, streams
from whet.runtime.wire import encode

BUSY_GRACE_SECONDS = 0.3
"""Seconds that `close` allows the workers while a call is under way: its caller does not want to wait for the call."""
PATIENCE_FOR_A_DEATH = 1.0


@frozen
class RpcSettings:
    """What all calls of a cluster have in common."""

    numbers: Iterator[int]
    """Numbers for the messages, each used once."""
    deadlines: Mapping[str, float]
    """The seconds that a phase may take. A phase that is not in it may take the longest of them."""
    grace_seconds: float
    """How long closing waits before it kills the processes."""

    def deadline(self, phase: str) -> float:
        """Return the seconds that a phase may take."""
        return self.deadlines[phase] if phase in self.deadlines else max(self.deadlines.values())


class Answers:
    """A call under way on several ranks, whose results are independent of each other."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._missing = set(ranks)
        self._awaited: set[int] = set()
        self._results: dict[int, Any] = {}
        self._errors: dict[int, WorkerError] = {}
        self._heeding: dict[int, list[Callable[[WorkerError | None], None]]] = {}
        self._changed = threading.Condition()

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's result or its error. Only the first counts."""
        with self._changed:
            if rank not in self._missing:
                return
            if error is None:
                self._results[rank] = result
            else:
                self._errors[rank] = error
            self._missing.discard(rank)
            if self._errors or not self._missing or rank in self._awaited:
                self._changed.notify_all()
            heeding = self._heeding.pop(rank, ())
        for call in heeding:
            call(error)

    def when(self, rank: int, call: Callable[[WorkerError | None], None]) -> bool:
        """Register `call` for the time when a rank has answered or failed, and return True.

        False: the rank has answered or failed already, or was not asked. `call` gets the error or None. The threads
        that serve all calls call it, so it may not wait.
        """
        with self._changed:
            if rank in self._missing:
                self._heeding.setdefault(rank, []).append(call)
                return True
            return False

    def result(self, rank: int) -> Any:
        """Wait for the result of a rank and return it. Raises `WorkerError`."""
        if rank in self._missing:
            with self._changed:
                self._awaited.add(rank)
                self._changed.wait_for(lambda: rank not in self._missing)
                self._awaited.discard(rank)
        if rank in self._errors:
            raise self._errors[rank]
        return self._results[rank]

    def error(self, kind: type[WorkerError] = WorkerError, patience_seconds: float = 0.0) -> WorkerError | None:
        """Return the first error of a kind, for which this waits while ranks have not answered. None: there is none."""

        def found() -> WorkerError | None:
            return next((error for error in self._errors.values() if isinstance(error, kind)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or not self._missing, patience_seconds)
            return found()

    def wait(self) -> None:
        """Wait until all ranks have answered, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._errors or not self._missing)

    def done(self) -> bool:
        """Return whether `result` would return or raise at once for every rank."""
        return not self._missing


class GatheredFuture:
    """A call under way on several ranks: done when all have answered or one has failed."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._answers = ranks, Answers(ranks)
        self.finish = self._answers.finish

    def result(self) -> list[Any]:
        """Wait for the results and return them in the order of the ranks. Raises `WorkerError`.

        When a rank dies, the ranks that talk to it raise, often before its death is known here. So after an error this
        waits a moment for a death, and raises that instead: the dead rank is the cause.
        """
        self._answers.wait()
        raised = self._answers.error()
        if raised is None:
            return [self._answers.result(rank) for rank in self._ranks]
        if isinstance(raised, WorkerLost) or not (death := self._answers.error(WorkerLost, PATIENCE_FOR_A_DEATH)):
            raise raised
        raise death from raised

    def done(self) -> bool:
        """Return whether `result` would return or raise without waiting for answers."""
        return self._answers.done() or self._answers.error() is not None


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
            connection.slots.add(slot)

    @property
    def processes(self) -> list[HostProcess]:
        """Return the process of each rank."""
        return [connection.process for connection in self._connections]

    def build(self, messages: Sequence[dict[str, Any]]) -> None:
        """Build one worker on each rank, and wait until all are built, with the deadline of the phase `start`."""
        self._building = list(messages)
        self._ask(range(self.size), messages, "start", None).result()

    @property
    def alone(self) -> bool:
        """Return whether no other role has workers in these processes, so that one process can be restarted."""
        return all(connection.slots <= {self._slot} for connection in self._connections)

    def restart(self, rank: int) -> None:
        """End the process of one rank, start a new process, and build the worker again in it."""
        if self._closed or not self.alone:
            why = "the workers are closed" if self._closed else "another role lives in its process"
            raise WorkerError(self.role, rank, "start", why)
        lost = self._connections[rank]
        lost.kill(WorkerError(self.role, rank, "start", "it is started anew"))
        end_all([lost], time.monotonic())
        lost.exit(self._slot)
        self._connections[rank] = self._connect[rank]()
        self._connections[rank].slots.add(self._slot)
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
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call a method on rank i with arguments[i], wait, and return the results by rank."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        messages = [self._message(method, row) for row in arguments]
        return self._ask(range(self.size), messages, phase or method, timeout_seconds).result()

    def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Yield the items of an async-generator method of one rank, from the process that the rank has now."""
        return one_stream(self._streams({rank: args}, method, phase or method))

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncGenerator[Heard, None]:
        """Yield the items of an async-generator method of several ranks. Each rank gets its own list as argument."""
        return self._streams({rank: (share,) for rank, share in shares.items()}, method, phase or method)

    def _streams(self, asked: Mapping[int, tuple[Any, ...]], method: str, phase: str) -> AsyncGenerator[Heard, None]:
        seconds, number = self._settings.deadline(phase), next(self._settings.numbers)
        messages = {rank: {**self._message(method, args), "do": "stream"} for rank, args in asked.items()}
        connections = {rank: self._connections[rank] for rank in asked}
        return streams(self.role, phase, seconds, number, messages, connections, self._mailboxes)

    def close(self) -> None:
        """Close the workers, then end their processes where no other role has workers in them."""
        if self._closed:
            return
        self._closed = True
        busy = any(connection.busy(self.role) for connection in self._connections)
        grace = BUSY_GRACE_SECONDS if busy else self._settings.grace_seconds
        deadline, number = time.monotonic() + grace, next(self._settings.numbers)
        closing = GatheredFuture(range(self.size))
        buffers = encode({"do": "close", "number": number, "slot": self._slot})
        for rank, connection in enumerate(self._connections):
            connection.ask(number, buffers, Call(self.role, rank, "close", grace, partial(closing.finish, rank)))
        with suppress(WorkerError):  # an error of a worker is in its log
            closing.result()
        ending = [connection for connection in self._connections if connection.exit(self._slot)]
        end_all(ending, deadline)

    def _message(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"do": "call", "slot": self._slot, "method": method, "args": tuple(args)}

    def _ask(
        self, ranks: Sequence[int], messages: Sequence[dict[str, Any]], phase: str, timeout_seconds: float | None
    ) -> GatheredFuture:
        """Send each rank its message, or send all ranks one message, which is encoded once. Return the call."""
        number, phase, seconds = self._terms_of(phase, timeout_seconds)
        framed = [frame(encode({"number": number, **message})) for message in messages]
        asked = [self._connections[rank] for rank in ranks]

        def missed(error: WorkerError) -> None:  # the other ranks may be stuck as well, so no process is used again
            for connection in asked:
                connection.kill(error)

        gathering = GatheredFuture(ranks)
        for place, (rank, connection) in enumerate(zip(ranks, asked, strict=True)):
            call = Call(self.role, rank, phase, seconds, partial(gathering.finish, rank), missed=missed)
            connection.ask(number, framed[place % len(framed)], call)
        return gathering

    def _terms_of(self, phase: str, timeout_seconds: float | None) -> tuple[int, str, float]:
        """Return the number of a call, its phase, and its deadline in seconds. Raises `WorkerError` once closed."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        seconds = self._settings.deadline(phase) if timeout_seconds is None else timeout_seconds
        return next(self._settings.numbers), phase, seconds
