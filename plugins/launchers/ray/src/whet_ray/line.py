"""Messages between the driver and one worker process that cross Ray as bytes.

    RayLine ── exchange.remote(number + message) ──> NodeAgent ── socket pair ──> worker_process
       ^────── number + what the process has sent ──────┘

`exchange` sends a message to the process and returns as soon as the process has sent something, so one call of a worker
is one call of Ray. Beside up to `_MOST_EXCHANGES` exchanges, one `drain` is always outstanding. It is the connection:
it fails at once when the agent, its node or Ray is lost. Messages and answers are numbered, because the agent is a
threaded actor, whose calls may overtake each other. Nothing is ever sent a second time.

A small message crosses as one `bytes`, which Ray does not pickle. A large message is put into the object store, once
for all processes that get it. Views of the object store are read-only; `Incoming` copies what it is fed.

Ray calls back on a thread of its own, which takes small answers directly. Everything that may take long is left to the
thread of the traffic, and so is an answer that is there before its call has returned: the caller may hold locks.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from whet.errors import in_words
from whet.runtime.channel import Framed, Incoming, fault_of, frame
from whet.runtime.traffic import Traffic
from whet.runtime.wire import Buffer
from whet_ray.node_agent import LARGE, NUMBER

_MOST_EXCHANGES: Final = 4
"""Exchanges that wait at one time, each on a thread of the agent. Beyond that, a message is sent without waiting."""


class RayLine:
    """Both directions between the driver and a node agent. Messages that are sent before it is open wait."""

    def __init__(
        self,
        traffic: Traffic,
        take: Callable[[list[memoryview]], Any],
        broken: Callable[[str], None],
        heard: Callable[[], None],
        report: Callable[[str, Any], None],
    ) -> None:
        """Make a line that is not open yet. `take`, `broken` and `heard` mean the same as for
        `whet.runtime.channel.Line`.

        `report` is called with all else that the agent sends: `output` and its bytes, `ended` and how the process
        ended, or `lost` and Ray's error. All four run on threads that serve all lines, so they must never wait.
        """
        self._traffic, self._take, self._broken, self._heard, self._report = traffic, take, broken, heard, report
        self._incoming, self._numbers = Incoming(), itertools.count()
        self._lock, self._taking = threading.Lock(), threading.Lock()
        self._waiting: list[Framed] = []
        self._agent: Any = None
        self._exchanges = 0
        """Exchanges that the agent has not answered."""
        self._early: dict[int, list[tuple[str, Any]]] = {}
        """Answers that came before one with a lower number."""
        self._next = 0
        """The number of the answer that is taken next."""
        self._deaf = False
        self.over = threading.Event()
        """Set when everything that the process sent has been taken, or when the line is closed."""

    def open(self, agent: Any) -> None:
        """Start to send and receive through an agent whose process has started."""
        self._exchange, self._drain = agent.exchange.remote, agent.drain.options(concurrency_group="control").remote
        self._send = agent.send.options(num_returns=0).remote
        with self._lock:
            waiting, self._waiting, self._agent = self._waiting, [], agent
            numbered = [(next(self._numbers), framed) for framed in waiting]
        self._await(self._drain, self._drained)
        for number, framed in numbered:
            self._carry(number, framed)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send one message, now or later, without waiting. Do not change its buffers before its answer has come."""
        framed = frame(buffers)
        with self._lock:
            if self._deaf:
                return
            if self._agent is None:
                self._waiting.append(framed)
                return
            number = next(self._numbers)
        self._carry(number, framed)

    def close(self) -> None:
        """Close the line, and drop messages that still wait."""
        with self._lock:
            self._deaf, self._waiting = True, []
        self.over.set()

    def _carry(self, number: int, framed: Framed) -> None:
        """Send a message; a large one on the thread of the traffic, because the object store may make it wait."""
        if len(framed) == 1 and framed[0].nbytes <= LARGE:
            self._call(b"".join((NUMBER.pack(number), framed[0])))
        else:
            self._traffic.order(partial(self._carry_large, number, framed))

    def _carry_large(self, number: int, framed: Framed) -> None:
        try:
            if framed.stored is None:
                framed.stored = import_module("ray").put([np.frombuffer(piece, np.uint8) for piece in framed])
        except Exception as error:  # Ray is about to end, or its object store is full
            self._break(f"the driver could not put a message into Ray's object store: {in_words(error)}")
        else:
            self._call(NUMBER.pack(number), framed.stored)

    def _call(self, *arguments: Any) -> None:
        with self._lock:
            waits = self._exchanges < _MOST_EXCHANGES
            self._exchanges += waits
        if waits:
            self._await(partial(self._exchange, *arguments), self._exchanged)
        else:
            with suppress(Exception):  # Ray is about to end, which `drain` reports
                self._send(*arguments)

    def _await(self, call: Callable[[], Any], then: Callable[["Future[Any]"], None]) -> None:
        """Call a method of the agent, and have `then` called with its answer."""
        try:
            answer: Future[Any] = call().future()
        except Exception as error:  # Ray is about to end
            answer = Future()
            answer.set_exception(error)
        caller: int | None = threading.get_ident()

        def came(answer: "Future[Any]") -> None:
            small = not answer.exception() and isinstance(answer.result(), bytes)
            if small and threading.get_ident() != caller:
                then(answer)
            else:
                self._traffic.order(partial(then, answer))

        answer.add_done_callback(came)
        caller = None

    def _exchanged(self, answer: "Future[Any]") -> None:
        with self._lock:
            self._exchanges -= 1
        self._receive(answer)

    def _drained(self, answer: "Future[Any]") -> None:
        self._receive(answer)
        if not self.over.is_set():
            self._await(self._drain, self._drained)

    def _receive(self, answer: "Future[Any]") -> None:
        """Take an answer of the agent, after all answers with lower numbers."""
        with self._taking:
            if self.over.is_set():
                return
            try:
                found = answer.result()
            except Exception as error:  # of Ray; the process asks for the cause
                self.close()
                self._report("lost", error)
                return
            if isinstance(found, bytes):
                self._early[NUMBER.unpack_from(found)[0]] = [("sent", memoryview(found)[NUMBER.size :])]
            else:
                self._early[found[0]] = found[1]
            while self._next in self._early:
                for kind, value in self._early.pop(self._next):
                    self._hear(kind, value)
                self._next += 1

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "sent":
            self._feed(memoryview(value))
        elif kind == "closed":
            self._break(value)
        else:
            if kind == "ended":
                self.close()
            self._report(kind, value)

    def _feed(self, data: memoryview) -> None:
        if self._deaf:
            return
        try:
            for message in self._incoming.feed(data):
                self._take(message)
            self._heard()
        except Exception as error:  # the edge: whatever a process sends, its end must still be noticed
            self._break(fault_of(error))

    def _break(self, cause: str) -> None:
        """Take no message any more. The end of the process is still awaited."""
        if not self._deaf:
            self._deaf = True
            self._broken(cause)
