"""The driver's end of a group of ranks: calls go to a leader, which passes them on and joins the answers.

    ConnectedWorkers ── Branch ──> the leader's `Connection` ──> Leader ──> siblings        `whet.runtime.relay`

Every process keeps its own `Connection`: streams, failures, signs of life and ends are told there. So that a death or a
deadline is told of the rank that it befell, a branch lends each connection the calls that this one owes an answer to.

A call of each of several ranks (`whet.runtime.each`) is over for a rank when its leader tells the answer. Who is late,
or has no leader any more, is asked directly, and is no business of the branch from then on.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from attrs import define, field

from whet.errors import WorkerError, WorkerLost
from whet.runtime.call import Call
from whet.runtime.connection import Connection
from whet.runtime.each import EachAsking, PassedOn
from whet.runtime.relay import JOIN_SECONDS
from whet.runtime.wire import Buffer, encode

_PATIENCE_FOR_A_LEADER: Final = 1.0
"""Past a deadline, until a leader has said who has not answered."""

MERGED: Final = object()
"""Stands for the answer of a rank that was merged into that of one before it."""


class Deadline:
    """Of one call through any number of leaders. Past it they are asked who is missing, and have a moment to say so."""

    def __init__(self, seconds: float) -> None:
        self.expires = time.monotonic() + seconds
        self.passed = False
        self._unsettled: set[Relayed] = set()

    def wait_for(self, share: "Relayed") -> None:
        """Wait for what a leader says."""
        self._unsettled.add(share)

    def extend(self) -> None:
        """Give leaders that moment, once."""
        if not self.passed:
            late = time.monotonic() + _PATIENCE_FOR_A_LEADER / 2
            self.passed, self.expires = True, max(self.expires + _PATIENCE_FOR_A_LEADER, late)

    def settle(self, share: "Relayed") -> bool:
        """Wait for that leader no more; whether it was the last, and the moment is over."""
        self._unsettled.discard(share)
        if not self.passed or self._unsettled:
            return False
        self.expires = min(self.expires, time.monotonic())
        return True


@define(eq=False)
class Relayed:
    """The share of a branch in a call under way."""

    phase: str
    timeout_seconds: float
    deadline: Deadline
    ranks: Sequence[int]
    answered: Callable[[Sequence[int], Sequence[Any]], None]
    """Called with ranks and their answers."""
    failed: Callable[[int, Any, WorkerError | None], None]
    """Called with a rank, nothing, and what went wrong there."""
    missed: Callable[[WorkerError], None]
    """Called when the deadline has passed."""
    missing: set[int] = field(init=False)
    """Ranks whose answers are not known to be there."""
    began: float = field(factory=time.monotonic, init=False)
    inquired: bool = field(default=False, init=False)
    """Whether the leader was asked who is missing, and `told`: whether it has said so."""
    joined: bool = field(default=False, init=False)
    """Whether the leader has given all answers that there are."""
    told: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.missing = set(self.ranks)
        self.deadline.wait_for(self)


class Branch:
    """One leader and its siblings, of one spawn."""

    def __init__(
        self, id: int, slot: int, role: str, connections: Mapping[int, Connection], parted: Callable[[int], None]
    ) -> None:
        """Make one of the connections of ranks, the leader's first. It is of use once `form` has said so.

        `parted` is called with a rank that is gone from its leader, though its process may live: form another one.
        """
        self.ranks = tuple(connections)
        self._id, self._slot, self._role, self._connections = id, slot, role, dict(connections)
        self._leader = self.ranks[0]
        self._rank_of = {connection: rank for rank, connection in connections.items()}
        self._parted = parted
        self._calls: dict[int, Relayed] = {}
        self._each: dict[int, PassedOn] = {}
        self._lock = threading.Lock()
        self._whole = True
        """Whether calls are passed on: no rank was lost or cut off, and no other branch has taken this one's place."""

    def form(self, numbers: Iterator[int]) -> "Future[bool]":
        """Let the siblings go to the leader; gives whether all are there."""
        formed, left = Future[bool](), set(self.ranks[1:])
        node = self._connections[self._leader].process.node
        far = [rank for rank in self.ranks[1:] if self._connections[rank].process.node != node]

        def joined(rank: int, result: Any, error: WorkerError | None) -> None:
            with self._lock:
                left.discard(rank)
                if formed.done() or (left and error is None):
                    return
                formed.set_result(error is None and self._whole)

        def listening(places: Any, error: WorkerError | None) -> None:
            if error is not None:
                formed.set_result(False)
                return
            for rank in self.ranks[1:]:
                message = {"do": "join", "rank": rank, "place": places[rank in far]}
                self._ask(rank, next(numbers), message, partial(joined, rank))

        for connection in self._connections.values():
            connection.join(self)
        lead = {"do": "lead", "rank": self._leader, "ranks": self.ranks, "far": far}
        self._ask(self._leader, next(numbers), lead, listening)
        return formed

    def ask(self, number: int, buffers: Sequence[Buffer], call: Relayed) -> bool:
        """Send a message for the leader to pass on; say whether it was, or the ranks must be asked one by one."""
        leader = self._connections[self._leader]
        with self._lock:
            whole = self._whole
            if whole:
                self._calls[number] = call
                leader.send(buffers)
        if whole:
            leader.watch(call.deadline.expires)
        else:
            self._settle(call)
        return whole

    def ask_each(self, buffers: Sequence[Buffer], asking: EachAsking) -> bool:
        """Send a call of each rank for the leader to pass on; say whether it was, or they must be asked directly."""
        leader = self._connections[self._leader]
        with self._lock:
            if not self._whole:
                return False
            self._each[asking.number] = PassedOn(asking, set(self.ranks))
            leader.send(buffers)
        leader.watch(asking.halfway)
        return True

    def retire(self) -> None:
        """Pass on nothing more."""
        with self._lock:
            self._whole = False

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        with self._lock:
            return not (self._calls or self._each)

    def close(self) -> None:
        """Be of no use any more; what is still under way fails."""
        with self._lock:
            self._whole = False
            calls, self._calls = list(self._calls.values()), {}
            each, self._each = [(one.asking, set(one.missing)) for one in self._each.values()], {}
        for connection in self._connections.values():
            connection.part(self)
        for call in calls:
            self._settle(call)
            error = WorkerError(self._role, None, call.phase, "the workers were closed")
            call.failed(self._leader, None, error)
        for asking, missing in each:
            for rank in missing:
                error = WorkerError(self._role, rank, asking.phase, "the workers were closed")
                asking.answers.finish(rank, None, error)

    # What follows is for connections.

    def take(self, connection: Connection, number: int, kind: str, value: Any) -> Call | None:
        """Take what a process said about a call; give the call where it failed."""
        rank = self._rank_of[connection]
        if kind == "unreachable":
            self._cut_off(value)
            return None
        if (share := self._each.get(number)) is not None:
            return self._take_each(share, rank, kind, value)
        with self._lock:
            call = self._calls.get(number)
            if call is None or kind not in ("failed", "waits", "joined"):
                return None  # over, or said by who was closed meanwhile, and heeds no leader any more
            if kind == "failed":
                return self._lent(number, call, rank)
            call.told = True
            if kind == "waits":
                call.missing &= set(value)
            else:
                ranks = self.ranks if value["ranks"] is None else value["ranks"]
                # Those that are left have said that they failed, on other connections, where it may yet be under way.
                call.missing, call.joined = call.missing.difference(ranks), True
                if not call.missing:
                    del self._calls[number]
        self._settle(call)
        if kind == "waits":
            return None
        values = [*value["values"], *[MERGED] * (len(ranks) - len(value["values"]))]
        call.answered(ranks, values)
        return None

    def lost(self, connection: Connection) -> list[Call]:
        """Note the end of a process; give the calls that end with it."""
        rank = self._rank_of[connection]
        with self._lock:
            self._whole = False
            owed = self._owed(rank)
            ended = [n for n, call in self._calls.items() if rank == self._leader and not call.joined]
            calls = [self._calls.pop(number) for number in ended]  # nobody will say more of them
            each = list(self._each.values()) if rank == self._leader else []
            for share in each:
                share.missing.discard(rank)
        for call in calls:
            self._settle(call)
        for share in each:
            self._ask_directly(share, self.ranks)
        if rank != self._leader:
            self._tell({"do": "gone", "rank": rank})
        return owed

    def owed(self, connection: Connection) -> list[Call]:
        """Give the calls that a process may not have answered. The leader owes all, until it said who does."""
        with self._lock:
            return self._owed(self._rank_of[connection])

    def expires(self, connection: Connection) -> float:
        """Give the first deadline of the calls that a process owes an answer to."""
        rank = self._rank_of[connection]
        with self._lock:
            expires = [self._expiry(rank, call) for call in self._calls.values() if self._owes(rank, call)]
            if rank == self._leader:
                expires += [share.asking.halfway for share in self._each.values()]
            return min(expires, default=math.inf)

    def inquire(self, connection: Connection, latest: float) -> None:
        """Where deadlines of calls through this process have passed, ask it who is missing.

        Of calls of each rank those are asked that are, when half of the time is over.
        """
        if self._rank_of[connection] != self._leader:
            return
        with self._lock:
            each = [share for share in self._each.values() if share.asking.halfway <= latest]
            due = {n: c for n, c in self._calls.items() if not c.inquired and self._due(c, latest)}
            for call in due.values():
                call.inquired = True
                call.deadline.extend()
            missing = {number: list(call.missing) for number, call in due.items()}
        for number, call in due.items():
            self._tell({"do": "waits", "number": number})
            for rank in missing[number]:
                self._connections[rank].watch(call.deadline.expires)
        for share in each:
            self._ask_directly(share, self.ranks)

    def _due(self, call: Relayed, latest: float) -> bool:
        return call.deadline.passed or call.deadline.expires <= latest

    def _settle(self, call: Relayed) -> None:
        if call.deadline.settle(call):
            self._connections[self._leader].watch(call.deadline.expires)

    def _cut_off(self, value: Mapping[str, Any]) -> None:
        """A rank is gone from its leader. Where all wait for its answer there, it is ended unless it ends."""
        if value["branch"] != self._id:
            return
        rank = value["rank"]
        with self._lock:
            before, awaited = self._whole, any(rank in call.missing for call in self._calls.values())
            self._whole = before and awaited
            each = [share for share in self._each.values() if rank in share.missing]
        if awaited and before:
            self._connections[rank].doubt(f"its process closed the connection to rank {self._leader}")
        for share in each:
            self._ask_directly(share, [rank])
        if not awaited:
            self._tell({"do": "gone", "rank": rank})
            if before:
                self._parted(rank)

    def _ask_directly(self, share: PassedOn, ranks: Collection[int]) -> None:
        """Ask those of these whose answers are missing, and wait no longer for what the leader says of them."""
        with self._lock:
            missing = sorted(share.missing.intersection(ranks))
            self._settle_each(share, missing)
        share.asking.directly({rank: self._connections[rank] for rank in missing})

    def _take_each(self, share: PassedOn, rank: int, kind: str, value: Any) -> Call | None:
        if kind == "failed":
            return self._lent_each(share, rank)
        if kind != "joined":
            return None
        ranks = self.ranks if value["ranks"] is None else value["ranks"]
        with self._lock:
            self._settle_each(share, ranks)
        share.asking.answers.finish_many(ranks, value["values"])
        return None

    def _lent_each(self, share: PassedOn, rank: int) -> Call:
        return share.asking.call(rank, self._connections[rank], partial(self._end_each, share))

    def _end_each(self, share: PassedOn, rank: int, result: Any, error: WorkerError | None) -> None:
        with self._lock:
            self._settle_each(share, [rank])
        share.asking.answers.finish(rank, result, error)

    def _settle_each(self, share: PassedOn, ranks: Collection[int]) -> None:
        """Wait for these no longer, with the lock held."""
        share.missing.difference_update(ranks)
        if not share.missing:
            self._each.pop(share.asking.number, None)

    def _owed(self, rank: int) -> list[Call]:
        each = [self._lent_each(share, rank) for share in self._each.values() if rank in share.missing]
        return [self._lent(n, call, rank) for n, call in self._calls.items() if self._owes(rank, call)] + each

    def _owes(self, rank: int, call: Relayed) -> bool:
        return rank in call.missing or (rank == self._leader and not call.told)

    def _expiry(self, rank: int, call: Relayed) -> float:
        return call.deadline.expires if call.inquired or rank == self._leader else math.inf

    def _lent(self, number: int, call: Relayed, rank: int) -> Call:
        """Give the share of one rank in a call, with the lock held."""
        done, phase = partial(self._end, number, call, rank), call.phase
        lent = Call(self._role, rank, phase, call.timeout_seconds, done, missed=call.missed)
        lent.began, lent.expires = call.began, self._expiry(rank, call)
        return lent

    def _end(self, number: int, call: Relayed, rank: int, result: Any, error: WorkerError | None) -> None:
        with self._lock:
            call.missing.discard(rank)
            call.told = call.told or (rank == self._leader and isinstance(error, WorkerLost))
            if not call.missing:
                self._calls.pop(number, None)
            over = call.told or not call.missing
        if over:
            self._settle(call)
        call.failed(rank, None, error)

    def _tell(self, message: dict[str, Any]) -> None:
        self._connections[self._leader].tell({**message, "branch": self._id, "slot": self._slot})

    def _ask(
        self, rank: int, number: int, message: dict[str, Any], done: Callable[[Any, WorkerError | None], None]
    ) -> None:
        buffers = encode({**message, "number": number, "branch": self._id, "slot": self._slot})
        self._connections[rank].ask(number, buffers, Call(self._role, rank, "start", JOIN_SECONDS, done))
