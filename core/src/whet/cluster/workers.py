"""The worker objects of one spawn, on connections to their processes, whatever started those.

    ConnectedWorkers ── call, scatter, start_each, stream ──> one `Connection` for each rank, shared with other roles
                     └─ call, scatter, of many ranks ──> one `Branch` for each group of them

Numbered messages go to `whet.cluster.host`; an answer whose call is over is dropped. Whatever ends a call of all
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

from whet import metrics
from whet.cluster.branch import MERGED, Branch, Deadline, Relayed
from whet.cluster.call import Call, HostProcess, Terms
from whet.cluster.channel import frame
from whet.cluster.connection import Connection
from whet.cluster.gathering import Answers, Gathering
from whet.cluster.slices import Heard, RankArguments
from whet.cluster.streams import Mailbox, Streams, one_stream
from whet.cluster.wire import encode
from whet.errors import WorkerError
from whet.metrics import Metric

_MOST_LEADERS = 4
"""Or nearly: what more there are would cost the driver, larger groups cost each leader."""
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
        self._groups: list[list[int]] = []
        self._led: tuple[list[Branch], list[int]] = [], list(range(self.size))
        """Branches, and the ranks of none; replaced as one, for calls begin while branches are formed."""
        self._retired: list[Branch] = []
        """Whose place others have taken, until the calls under way are over."""
        self._unformed: list[list[int]] = []
        """Groups that nobody leads yet, or that had a rank restarted: they are formed when all ranks are called."""
        self._forming = threading.Lock()
        self._mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()
        self._closed = False
        for connection in self._connections:
            connection.enter(slot)

    @property
    def _branches(self) -> list[Branch]:
        return self._led[0]

    @property
    def processes(self) -> list[HostProcess]:
        """The process of each rank."""
        return [connection.process for connection in self._connections]

    def build(self, messages: Sequence[dict[str, Any]]) -> None:
        """Have one worker built on each rank, and wait for them under the deadline `start`."""
        self._building = list(messages)
        self._build(range(self.size), messages)
        if self.size > self._terms.fan_out:
            most = max(self._terms.fan_out, -(-self.size // _MOST_LEADERS))
            self._groups = node_groups([process.node for process in self.processes], most)
            self._unformed = list(self._groups)

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
        with self._forming:
            self._unformed += [ranks for ranks in self._groups if rank in ranks and ranks not in self._unformed]

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
        """Start a call on each of these ranks over its own connection; no rank's result depends on another."""
        number, phase, seconds = self._terms_of(phase or method, timeout_seconds)
        message = frame(encode({"do": "call", "number": number, "slot": self._slot, "method": method, "args": args}))
        answers = Answers(ranks)
        for rank in ranks:
            connection, done = self._connections[rank], partial(answers.finish, rank)
            connection.ask(number, message, Call(self.role, rank, phase, seconds, done, missed=connection.kill))
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
        for branch in self._branches:
            branch.retire()
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
        for branch in [*self._branches, *self._retired]:
            branch.close()

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
        if self._unformed:
            self._form_due()
        branches, alone = self._led[0], list(self._led[1])
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

    def _form_due(self) -> None:
        with self._forming:
            groups, self._unformed = self._unformed, []
        self._form(groups)

    def _form(self, groups: Sequence[Sequence[int]]) -> None:
        """Let the first of each group lead it. A group that cannot be led is asked one by one."""
        with self._forming:
            made, numbers = [], self._terms.numbers
            for ranks in groups:
                connections = {rank: self._connections[rank] for rank in ranks}
                branch = Branch(next(numbers), self._slot, self.role, connections)
                made.append((branch, branch.form(numbers)))
            formed = [branch for branch, future in made if future.result()]
            again = {rank for ranks in groups for rank in ranks}
            kept = [branch for branch in self._branches if again.isdisjoint(branch.ranks)]
            self._retired += {*self._branches, *(branch for branch, _ in made)} - {*kept, *formed}
            branches = sorted([*kept, *formed], key=lambda branch: branch.ranks)
            led = {rank for branch in branches for rank in branch.ranks}
            self._led = branches, [rank for rank in range(self.size) if rank not in led]
            for branch in self._retired:
                branch.retire()
            for branch in [branch for branch in self._retired if branch.idle]:
                branch.close()
                self._retired.remove(branch)


@frozen
class _Asking:
    """What the messages of one call have in common."""

    number: int
    gathering: Gathering
    phase: str
    seconds: float
    missed: Callable[[WorkerError], None]


def node_groups(nodes: Sequence[str], most: int) -> list[list[int]]:
    """Group ranks, each given by the name of its node: at most so many, those of one node together where it can be."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    groups: list[list[int]] = []
    for ranks in by_node.values():
        if groups and len(groups[-1]) + len(ranks) <= most:
            groups[-1] += ranks
            continue
        parts = -(-len(ranks) // most)
        groups += [ranks[len(ranks) * n // parts : len(ranks) * (n + 1) // parts] for n in range(parts)]
    return [group for group in groups if len(group) > 1]


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
