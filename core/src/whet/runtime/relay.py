"""Passes calls on between worker processes, so that the driver speaks to one of many.

    driver ── relay ──> Leader ── call ──> Sibling, ...      over Unix sockets, which only processes of one user pass;
    driver <── joined ─ Leader <── done ── Sibling, ...      to those of other nodes over TCP (`whet.runtime.door`)
       ^──────────────── failed, alive ───────┘              over each process's own connection, as ever

See `whet.runtime.branch` for the driver's end.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

from attrs import define, field

from whet.data import metrics
from whet.errors import WhetError, in_words
from whet.runtime.channel import copied, of_this_user, receive, send
from whet.runtime.door import Door, DoorError, knock
from whet.runtime.threads import watched
from whet.runtime.traffic import Line, Traffic
from whet.runtime.ways import Route
from whet.runtime.wire import Buffer, decode, encode

log = logging.getLogger(__name__)

JOIN_SECONDS: Final = 30.0
"""Within which all siblings must have come."""
_LONGEST_GREETING: Final = 1 << 10
_HEAD: Final = ("number", "slot", "method", "once")
"""What a call has in common with the message that it came in."""
_SO_FAR_SECONDS: Final = 0.02
"""Between the first answer of a call of each rank and telling the driver what there is so far."""
_LOOK_SECONDS: Final = 0.1
"""Between two looks whether all siblings are there, some of which come by another way."""

Obey = Callable[[dict[str, Any], Route], None]
"""Do what a message says, and give the answer to the route."""


@define(eq=False)
class _Joining:
    """The answers to one call, until all are there."""

    ranks: list[int]
    merge: bool
    each: bool
    """Whether an answer is of use before all are there."""
    missing: set[int] = field(init=False)
    values: dict[int, Any] = field(factory=dict, init=False)
    """Those that the driver was not told yet."""

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
        self._complete = threading.Event()
        """Set when all siblings are there."""
        self._retired = False
        self.closed = False
        """Whether it has parted from all siblings."""

    def listen(self, far: Collection[int], address: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Let siblings come, in the background: give the place for those of this node, and that for those `far` away.

        For these it listens at `address`. Raises `OSError` or `WhetError`.
        """
        name, token = f"whet-{secrets.token_hex(16)}", secrets.token_bytes(32)
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"\0{name}")  # without a file, which nobody would remove after a kill
            listening.listen(len(self._ranks))
            door = Door(address, token, self._let_in, purpose="calls that are passed on") if far else None
        except BaseException:
            listening.close()
            raise
        threading.Thread(target=self._welcome, args=(listening, door), name="whet-relay", daemon=True).start()
        return {"name": name}, {"address": list(door.address), "token": token} if door else {}

    def relay(self, message: dict[str, Any]) -> None:
        """Pass a call on to all ranks."""
        number, ranks = message["number"], self._ranks
        head: dict[str, Any] = {name: message[name] for name in _HEAD if name in message}
        head["do"] = "call"
        with self._lock:
            self._calls[number] = _Joining(list(ranks), message.get("merge", False), "once" in message)
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
        with self._lock:
            self.closed = True
            lines = list(self._lines.values())
        for line in lines:
            line.close()

    def _welcome(self, listening: socket.socket, door: Door | None) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        # who is not admitted does not say so to the driver, which then does without this leader
        with ExitStack() as closing:
            closing.enter_context(listening)
            if door is not None:
                closing.callback(door.close)
            listening.settimeout(_LOOK_SECONDS)
            while not (self._complete.is_set() or self.closed) and time.monotonic() < deadline:
                with suppress(OSError):  # nobody came yet
                    self._greet(listening.accept()[0], deadline)

    def _greet(self, sock: socket.socket, deadline: float) -> None:
        admitted = False
        try:
            if of_this_user(sock):
                admitted = self._admit(decode(receive(sock, _LONGEST_GREETING, deadline)), sock)
        except (OSError, EOFError, WhetError) as error:
            log.warning(
                "somebody who came to rank %d to be led by it was not understood: %s", self._rank, in_words(error)
            )
        finally:
            if not admitted:
                sock.close()

    def _let_in(self, name: str, guest: socket.socket) -> None:
        if not (name.isdecimal() and self._admit(int(name), guest)):
            raise DoorError(f"{name!r} is none of those that are to come")

    def _admit(self, rank: Any, sock: socket.socket) -> bool:
        with self._lock:
            known = isinstance(rank, int) and rank in self._ranks and rank != self._rank
            if not known or rank in self._lines or self.closed:
                return False
            line = Line(self._traffic, partial(self._take, rank), partial(self._lost, rank))
            self._lines[rank] = line
            complete = len(self._lines) == len(self._ranks) - 1
        line.send(encode("welcome"))
        line.open(sock)
        if complete:
            self._complete.set()
        return True

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
            first = not call.values
            call.values.update(values)
            if call.missing:
                if call.each and first and values:
                    self._tell_soon(number)
                return
            del self._calls[number]
            over = self._retired and not self._calls
        self._say(number, "joined", call.joined())
        if over:
            self.close()

    def _tell_soon(self, number: int) -> None:
        """Tell the driver in a moment what there is of a call of each rank, unless that is all."""

        def tell() -> None:
            with self._lock:
                call = self._calls.get(number)
                if call is None:
                    return
                told, call.values = call.joined(), {}
            self._say(number, "joined", told)

        timer = threading.Timer(_SO_FAR_SECONDS, tell)
        timer.daemon = True
        with suppress(RuntimeError):  # no thread more: then it is told with the last answer
            timer.start()

    def _lost(self, rank: int, cause: str) -> None:
        self._lines[rank].close()
        if not self.closed:
            self._say(0, "unreachable", {"branch": self._branch, "rank": rank})
        with self._lock:
            each = [number for number, call in self._calls.items() if call.each and rank in call.missing]
        for number in each:  # the driver asks it directly
            self._note(number, rank, {})


class Sibling:
    """The end of a process that gets its calls from a leader."""

    def __init__(
        self, place: Mapping[str, Any], rank: int, obey: Obey, joined: Callable[[Exception | None], None]
    ) -> None:
        """Go to a leader, in the background; `joined` is called when it is admitted, or with why it is not."""
        self._obey, self._joined = obey, joined
        self._sending = threading.Lock()
        watched("whet-relay", partial(self._live, place, rank), over=lambda: True)

    def _live(self, place: Mapping[str, Any], rank: int) -> None:
        try:
            self._socket = meet(place, rank)
            receive(self._socket)
        except (EOFError, OSError, WhetError) as error:
            self._joined(error)
            return
        self._joined(None)
        with suppress(EOFError, OSError), self._socket:  # the driver hears of a leader's end by itself
            while True:
                self._obey(decode(receive(self._socket)), self._answer)

    def _answer(self, buffers: Sequence[Buffer]) -> None:
        with suppress(OSError), self._sending:
            send(self._socket, buffers)


def meet(place: Mapping[str, Any], rank: int) -> socket.socket:
    """Give a connection to a leader that knows who came. Raises `OSError`, `EOFError` or `WhetError`."""
    if "address" in place:
        host, port = place["address"]
        return knock((host, port), place["token"], str(rank), JOIN_SECONDS)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(f"\0{place['name']}")
        if not of_this_user(sock):
            raise PermissionError("the socket of the leader belongs to another user")
        send(sock, encode(rank))
    except BaseException:
        sock.close()
        raise
    return sock
