"""Passes calls on between the processes of one node, so that the driver speaks to one of many.

    driver ── relay ──> Leader ── call ──> Sibling, ...      over Unix sockets, which only processes of one user pass
    driver <── joined ─ Leader <── done ── Sibling, ...
       ^──────────────── failed, alive ───────┘              over each process's own connection, as ever

See `whet.cluster.branch` for the driver's end.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from attrs import define, field

from whet import metrics
from whet.cluster.channel import copied, of_this_user, receive, send
from whet.cluster.traffic import Line, Traffic
from whet.cluster.wire import Buffer, decode, encode
from whet.errors import WhetError

JOIN_SECONDS: Final = 30.0
"""Within which all siblings must have come."""
_LONGEST_GREETING: Final = 1 << 10

Route = Callable[[Sequence[Buffer]], None]
"""Where a message about a call goes to."""
Obey = Callable[[dict[str, Any], Route], None]
"""Do what a message says, and give the answer to the route."""


@define(eq=False)
class _Joining:
    """The answers to one call, until all are there."""

    ranks: list[int]
    merge: bool
    missing: set[int] = field(init=False)
    values: dict[int, Any] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.missing = set(self.ranks)

    def joined(self) -> dict[str, Any]:
        ranks = [rank for rank in self.ranks if rank in self.values]
        values = [self.values[rank] for rank in ranks]
        if self.merge and values:
            with suppress(Exception):  # what are no metrics is the caller's to complain about
                values = [metrics.merge(values)]
        return {"ranks": ranks if len(ranks) < len(self.ranks) else None, "values": values}


class Leader:
    """The end of one process, to which its siblings come."""

    def __init__(self, branch: int, rank: int, ranks: Sequence[int], traffic: Traffic, obey: Obey, say: Any) -> None:
        """Lead those `ranks` of one spawn, `rank` itself among them; `say` (number, kind, value) tells the driver."""
        self._branch, self._rank, self._ranks, self._traffic = branch, rank, list(ranks), traffic
        self._obey, self._say = obey, say
        self._lines: dict[int, Line] = {}
        self._calls: dict[int, _Joining] = {}
        self._lock = threading.Lock()
        self._retired, self._closed = False, False

    def listen(self) -> str:
        """Give the name of a socket to which siblings may come, in the background. Raises `OSError`."""
        name = f"whet-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"\0{name}")  # without a file, which nobody would remove after a kill
            listening.listen(len(self._ranks))
        except BaseException:
            listening.close()
            raise
        threading.Thread(target=self._welcome, args=(listening,), name="whet-relay", daemon=True).start()
        return name

    def relay(self, message: dict[str, Any]) -> None:
        """Pass a call on to all ranks."""
        number, ranks = message["number"], self._ranks
        head = {"do": "call", "number": number, "slot": message["slot"], "method": message["method"]}
        with self._lock:
            self._calls[number] = _Joining(list(ranks), message["merge"])
        rows = message.get("rows")
        same = encode({**head, "args": message["args"]}) if rows is None else []
        own: Sequence[Buffer] = []
        for rank, row in zip(ranks, [()] * len(ranks) if rows is None else rows, strict=True):
            buffers = same or encode({**head, "args": row})
            if rank == self._rank:
                own = copied(buffers)  # what this worker does to its arrays is not for those who get theirs later
            elif rank in self._lines:
                self._lines[rank].send(buffers)
        if own:
            self._obey(decode(own), partial(self._take, self._rank))

    def waits(self, number: int) -> None:
        """Tell the driver who has not answered a call."""
        with self._lock:
            missing = sorted(self._calls[number].missing) if number in self._calls else []
        self._say(number, "waits", missing)

    def gone(self, rank: int) -> None:
        """Wait no longer for a rank whose end the driver knows of."""
        with self._lock:
            numbers = [number for number, call in self._calls.items() if rank in call.missing]
        for number in numbers:
            self._note(number, rank, {})

    def retire(self) -> None:
        """Part from all siblings when the calls under way are over: another leader has taken this one's place."""
        with self._lock:
            self._retired = True
            idle = not self._calls
        if idle:
            self.close()

    def close(self) -> None:
        """Part from all siblings."""
        self._closed = True
        for line in list(self._lines.values()):
            line.close()

    def _welcome(self, listening: socket.socket) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        # who is not admitted does not say so to the driver, which then does without this leader
        with suppress(OSError, EOFError, WhetError), listening:
            while len(self._lines) < len(self._ranks) - 1 and not self._closed:
                listening.settimeout(max(deadline - time.monotonic(), 1e-4))
                self._admit(listening.accept()[0], deadline)

    def _admit(self, sock: socket.socket, deadline: float) -> None:
        rank = decode(receive(sock, _LONGEST_GREETING, deadline)) if of_this_user(sock) else None
        if rank not in self._ranks or rank in self._lines:
            sock.close()
            return
        line = Line(self._traffic, partial(self._take, rank), partial(self._lost, rank))
        self._lines[rank] = line
        line.send(encode("welcome"))
        line.open(sock)

    def _take(self, rank: int, buffers: Sequence[Buffer]) -> None:
        message = decode(buffers)
        done = message["say"] == "done"
        self._note(message["number"], rank, {rank: message["value"]} if done else {})

    def _note(self, number: int, rank: int, values: dict[int, Any]) -> None:
        """Note that a rank has answered, or will not; tell the driver what there is when it was the last."""
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                return
            call.missing.discard(rank)
            call.values.update(values)
            if call.missing:
                return
            del self._calls[number]
            over = self._retired and not self._calls
        self._say(number, "joined", call.joined())
        if over:
            self.close()

    def _lost(self, rank: int, cause: str) -> None:
        self._lines[rank].close()
        if not self._closed:
            self._say(0, "unreachable", {"branch": self._branch, "rank": rank})


class Sibling:
    """The end of a process that gets its calls from a leader."""

    def __init__(self, name: str, rank: int, obey: Obey, ready: Callable[[], None]) -> None:
        """Go to a leader; `ready` is called when it is admitted. Raises `OSError`."""
        self._obey, self._ready = obey, ready
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(f"\0{name}")
            if not of_this_user(self._socket):
                raise PermissionError("the socket of the leader belongs to another user")
            send(self._socket, encode(rank))
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._read, name="whet-relay", daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError), self._socket:  # the driver hears of a leader's end by itself
            receive(self._socket)
            self._ready()
            while True:
                self._obey(decode(receive(self._socket)), self._answer)

    def _answer(self, buffers: Sequence[Buffer]) -> None:
        with suppress(OSError), self._sending:
            send(self._socket, buffers)
