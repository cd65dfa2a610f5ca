"""The worker objects of one spawn, on connections to their processes, whatever started those.

    ConnectedWorkers ── start_on, stream, calls of few ranks ──> one `Connection` for each rank, shared with other roles
                     └─ calls of many ranks ──> `Groups` of them, one `Branch` for each

Numbered messages go to `worker_process`; an answer whose call is over is dropped. Whatever ends a call of all
ranks (an exception, a death, a deadline) ends it at once for all of them, with a `WorkerError`.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from attrs import frozen

from whet.data import metrics
from whet.data.metrics import Metric
from whet.errors import WorkerError
from whet.interfaces.workers import Heard, RankArguments
from whet.runtime.branch import MERGED, Branch, Deadline, Relayed
from whet.runtime.call import Call, HostProcess, Terms
from whet.runtime.channel import frame
from whet.runtime.connection import Connection
from whet.runtime.each import EachAsking
from whet.runtime.futures import Answers, Gathering
from whet.runtime.groups import Groups
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
        self._groups = Groups(role, slot, self._connections, terms)
        self._each: list[tuple[int, Answers]] = []
        """Calls of each of several ranks that were made last, and their numbers."""
        self._lock = threading.Lock()
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
        self._build(range(self.size), messages)
        self._groups.arrange()

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
        self._build([rank], [self._building[rank]])
        self._groups.renew(rank)

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call on every rank with the same arguments and wait."""
        return self.start(method, *args, phase=phase, timeout_seconds=timeout_seconds).result()

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> Gathering:
        """Start a call on every rank. Leave the arguments' arrays as they are until it is done."""
        return self._start(method, args, None, phase, timeout_seconds)

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Gathering:
        """Start a call on one rank; its result is a list of one."""
        number, phase, seconds = self._terms_of(phase or method, timeout_seconds)
        message = encode({"do": "call", "number": number, "slot": self._slot, "method": method, "args": args})
        gathering, connection = Gathering(1), self._connections[rank]
        done = partial(gathering.finish, 0)
        connection.ask(number, message, Call(self.role, rank, phase, seconds, done, missed=connection.kill))
        return gathering

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Answers:
        """Start a call on each of these ranks; no rank's result depends on another.

        Through leaders, where there are some. Who has not answered when its leader is gone, or after half of the time,
        is asked directly: a call that it has had already it does not do again.
        """
        answers, left = Answers(ranks), {rank: self._connections[rank] for rank in ranks}
        with self._lock:
            number, phase, seconds = self._terms_of(phase or method, timeout_seconds)
            open_ = [(earlier, one) for earlier, one in self._each if not one.done()] + [(number, answers)]
            head = {"number": number, "slot": self._slot, "method": method, "args": args, "once": open_[0][0]}
            message, relay = [frame(encode({"do": do, **head})) for do in ("call", "relay")]
            self._each = open_
        asking = EachAsking(self.role, number, phase, seconds, answers, message)
        self._groups.form_soon()
        for branch in self._groups.led[0]:
            if left.keys() >= set(branch.ranks) and branch.ask_each(relay, asking):
                for rank in branch.ranks:
                    del left[rank]
        asking.directly(left)
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
        return self._scatter(method, arguments, phase, timeout_seconds, merge=False)

    def scatter_metrics(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> dict[str, Metric]:
        """Call rank i with arguments[i], wait, and merge the metrics that all give."""
        found = self._scatter(method, arguments, phase, timeout_seconds, merge=True)
        return metrics.merge(part for part in found if part is not MERGED)

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
        self._groups.retire()
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
        self._groups.close()

    def _scatter(
        self, method: str, arguments: Sequence[tuple[Any, ...]], phase: str, seconds: float | None, merge: bool
    ) -> list[Any]:
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        return self._start(method, (), arguments, phase, seconds, merge).result()

    def _start(
        self,
        method: str,
        args: tuple[Any, ...],
        rows: Sequence[tuple[Any, ...]] | None,
        phase: str,
        timeout_seconds: float | None,
        merge: bool = False,
    ) -> Gathering:
        """Call a method with the same arguments, or with a row of them for each rank."""
        asking = self._asking(range(self.size), phase or method, timeout_seconds)
        head = {"number": asking.number, "slot": self._slot, "method": method}
        relay: dict[str, Any] = {"do": "relay", **head, "args": args, "merge": merge}
        self._groups.form()
        branches, others = self._groups.led
        alone = list(others)
        same = encode(relay) if branches and rows is None else []
        messages = [same or encode({**relay, "rows": _rows(rows or (), branch.ranks)}) for branch in branches]
        deadline = Deadline(asking.seconds)
        for branch, buffers in zip(branches, messages, strict=True):
            if not branch.ask(asking.number, buffers, self._relayed(asking, branch, deadline)):
                alone += branch.ranks
        each = {"do": "call", **head, "args": args}
        calls = [each] * len(alone) if rows is None else [{**each, "args": tuple(rows[rank])} for rank in alone]
        return self._ask(asking, {rank: rank for rank in alone}, calls)

    def _asking(self, ranks: Sequence[int], phase: str, timeout_seconds: float | None) -> "_Asking":
        number, phase, seconds = self._terms_of(phase, timeout_seconds)
        asked = [self._connections[rank] for rank in ranks]
        return _Asking(number, Gathering(len(ranks)), phase, seconds, partial(_missed, asked))

    def _terms_of(self, phase: str, timeout_seconds: float | None) -> tuple[int, str, float]:
        """Give the number of a call, its phase, and its deadline in seconds. Raises `WorkerError` once closed."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        seconds = self._terms.deadline(phase) if timeout_seconds is None else timeout_seconds
        return next(self._terms.numbers), phase, seconds

    def _relayed(self, asking: "_Asking", branch: Branch, deadline: Deadline) -> Relayed:
        answered, failed = asking.gathering.finish_many, asking.gathering.finish
        return Relayed(asking.phase, asking.seconds, deadline, branch.ranks, answered, failed, asking.missed)

    def _ask(self, asking: "_Asking", places: Mapping[int, int], messages: Sequence[dict[str, Any]]) -> Gathering:
        """Send a message to each of these ranks, whose answers belong at such places."""
        same = all(message is messages[0] for message in messages)
        sent = [encode({"number": asking.number, **message}) for message in (messages[:1] if same else messages)]
        for at, (rank, place) in enumerate(places.items()):
            done = partial(asking.gathering.finish, place)
            call = Call(self.role, rank, asking.phase, asking.seconds, done, missed=asking.missed)
            self._connections[rank].ask(asking.number, sent[0 if same else at], call)
        return asking.gathering

    def _build(self, ranks: Sequence[int], messages: Sequence[dict[str, Any]]) -> None:
        places = {rank: place for place, rank in enumerate(ranks)}
        self._ask(self._asking(ranks, "start", None), places, messages).result()


@frozen
class _Asking:
    """What the messages of one call have in common."""

    number: int
    gathering: Gathering
    phase: str
    seconds: float
    missed: Callable[[WorkerError], None]


def _rows(rows: Sequence[tuple[Any, ...]], ranks: Sequence[int]) -> Sequence[tuple[Any, ...]]:
    neighbours = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    if neighbours and isinstance(rows, RankArguments):
        return rows[ranks[0] : ranks[-1] + 1]
    return [tuple(rows[rank]) for rank in ranks]


def _missed(asked: Sequence[Connection], error: WorkerError) -> None:
    """End the processes of all that were asked: whoever misses a deadline is not trusted again.

    Theirs, and not their ranks': those may have been given another process meanwhile.
    """
    for connection in asked:
        connection.kill(error)
