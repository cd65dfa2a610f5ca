"""The driver's end of one worker process: what was asked, what came back, and how it ended.

live      starts the process and waits for its end (the kernel ties the process to this thread)
write     sends, so that nobody blocks on a process that does not read
read      takes answers to the calls that wait for them
"""

import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from whet.cluster.channel import receive, send
from whet.cluster.process import Child, describe_end, last_words
from whet.cluster.wire import Buffer, WireError, decode, encode
from whet.errors import WorkerError

_PATIENCE_FOR_STACKS = 0.1
_DEEPEST_STACK = 20
_MOMENT_SECONDS = 0.05
_STANDSTILLS = {"T": "; its process is stopped", "D": "; its process waits for a disk or another device"}
_IDLE = ("cluster/channel.py", "/selectors.py", "cluster/host.py")
"""Where a thread of a worker process waits for something to do."""


@define(eq=False)
class Call:
    """Something asked of a worker, until it is answered."""

    role: str
    rank: int
    phase: str
    timeout_seconds: float
    """For the answer, or for each item of a stream."""
    done: Callable[[Any, WorkerError | None], None]
    part: Callable[[Any], None] = lambda item: None
    missed: Callable[[WorkerError], None] = lambda error: None
    """Called when the deadline has passed."""
    expires: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Let the deadline begin anew."""
        self.expires = time.monotonic() + self.timeout_seconds

    def error(self, cause: str, words: str = "", details: str = "") -> WorkerError:
        """Say that this call failed."""
        return WorkerError(self.role, self.rank, self.phase, cause, words, details)


class Clock:
    """One thread that watches the deadlines of all calls of a cluster."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._next = math.inf
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def watch(self, connection: "Connection", expires: float) -> None:
        """Look at a connection's calls when that time comes, at the latest."""
        with self._changed:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="whet-deadlines", daemon=True)
                self._thread.start()
            elif expires < self._next:
                self._changed.notify()

    def forget(self, connection: "Connection") -> None:
        """Look at it no longer."""
        with self._changed:
            self._connections.discard(connection)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._next = min((c.next_deadline() for c in self._connections), default=math.inf)
                wait = self._next - time.monotonic()
                if wait > 0:
                    self._changed.wait(None if wait == math.inf else wait)
                if self._stopped:
                    return
                connections = list(self._connections)
            _end_overdue(sorted((c for c in connections if c.overdue), key=lambda c: c.name))


def _end_overdue(connections: "Sequence[Connection]") -> None:
    """Fail the calls that have missed their deadlines: first that of a process which stands still, for where ranks
    wait for each other it is the one to blame, and the first failure is the one that is told.
    """
    stands = {connection: connection.standstill() for connection in connections}
    words = {connection: connection.last_words() for connection in connections}
    told = [f"{c.name}:\n{words[c]}" if len(connections) > 1 else words[c] for c in connections if words[c]]
    for connection in sorted(connections, key=lambda c: not stands[c]):
        connection.end_overdue(stands[connection], "\n".join(told))


class Connection:
    """One worker process, started at once in the background."""

    def __init__(self, name: str, log: Path, environment: Mapping[str, str], clock: Clock) -> None:
        self.name, self._log, self._environment, self._clock = name, log, environment, clock
        log.touch()
        self._log_begin = log.stat().st_size
        self._calls: dict[int, Call] = {}
        self._slots: set[int] = set()
        self._outbox: queue.SimpleQueue[Sequence[Buffer] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._exited, self._gone = threading.Event(), threading.Event()
        self._cause = ""
        """Why it is no longer of use; empty while it is."""
        self._child: Child | None = None
        self._threads = [
            threading.Thread(target=target, name=f"whet-{name}-{target.__name__.strip('_')}", daemon=True)
            for target in (self._live, self._write, self._read)
        ]
        self._started = threading.Event()
        self._threads[0].start()

    @property
    def dead(self) -> bool:
        """Whether the process is gone, or about to be."""
        return bool(self._cause)

    @property
    def pid(self) -> int:
        """Of the process, once it is started; 0 where it could not be."""
        self._started.wait()
        return 0 if self._child is None else self._child.pid

    def ask(self, number: int, buffers: Sequence[Buffer], call: Call) -> None:
        """Send a message whose answer `call` waits for. Of a dead process the call fails at once."""
        with self._lock:
            cause = self._cause
            if not cause:
                self._calls[number] = call
                self._outbox.put(buffers)
        if cause:
            call.done(None, call.error(cause, self._words()))
        else:
            self._clock.watch(self, call.expires)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        self._outbox.put(encode(message))

    def drop(self, number: int) -> None:
        """Wait no longer for the answer to a call."""
        with self._lock:
            self._calls.pop(number, None)

    def busy(self, role: str | None = None) -> bool:
        """Whether calls of a role, or any, are under way."""
        with self._lock:
            return any(role in (None, call.role) for call in self._calls.values())

    def enter(self, slot: int) -> None:
        """Note that workers of a spawn live here."""
        with self._lock:
            self._slots.add(slot)

    def exit(self, slot: int) -> bool:
        """Note that they are gone; where they were the last, ask the process to end and say so."""
        with self._lock:
            self._slots.discard(slot)
            last = not self._slots
        if last:
            self.leave()
        return last

    def leave(self) -> None:
        """Ask the process to end."""
        with self._lock:
            self._cause = self._cause or "its process was closed"
        self.tell({"do": "exit"})

    def end(self, deadline: float) -> None:
        """Wait for its end, and bring it about at a deadline in the seconds of `time.monotonic`."""
        if not self._gone.wait(max(0.0, deadline - time.monotonic())):
            self._kill()
            self._gone.wait(10.0)

    def kill(self, reason: WorkerError) -> None:
        """End the process because of a failure; every call under way fails."""
        with self._lock:
            self._cause = self._cause or f"its process was ended because {str(reason).splitlines()[0]}"
        self._kill()

    def next_deadline(self) -> float:
        """Give the time at which the first of the calls under way must have been answered."""
        with self._lock:
            return min((call.expires for call in self._calls.values()), default=math.inf)

    @property
    def overdue(self) -> bool:
        """Whether a call has missed its deadline; those that were made with it a moment later count as well."""
        return self.next_deadline() <= time.monotonic() + _MOMENT_SECONDS

    def standstill(self) -> str:
        """Say why the process cannot even be scheduled, where it cannot."""
        return "" if self._child is None else _STANDSTILLS.get(self._child.state(), "")

    def last_words(self) -> str:
        """Give the end of the process's log, and what its busy threads do."""
        return "\n".join(filter(None, (self._words(), self._stacks())))

    def end_overdue(self, standstill: str, words: str) -> None:
        """Fail the calls that have missed their deadlines, and end the processes that they were made of."""
        latest = time.monotonic() + _MOMENT_SECONDS
        with self._lock:
            numbers = [number for number, call in self._calls.items() if call.expires <= latest]
            calls = [self._calls.pop(number) for number in numbers]
        for call in calls:
            error = call.error(f"no answer within {call.timeout_seconds:g} s{standstill}", words)
            call.done(None, error)
            call.missed(error)

    def _kill(self) -> None:
        self._started.wait(10.0)
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _stacks(self) -> str:
        """Say what each busy thread of the process is doing, as far as it can still tell."""
        if self._child is None:
            return ""
        begin = self._log.stat().st_size if self._log.exists() else 0
        self._child.signal(signal.SIGUSR1)  # `whet.cluster.host` answers it into the log
        time.sleep(_PATIENCE_FOR_STACKS)
        threads = [thread.splitlines() for thread in last_words(self._log, begin, lines=1000).split("\n\n")]
        busy = [lines for lines in threads if not any(place in line for place in _IDLE for line in lines[1:2])]
        return "\n".join(line for lines in busy for line in lines[:_DEEPEST_STACK])

    def _words(self) -> str:
        return last_words(self._log, self._log_begin)

    def _live(self) -> None:
        try:
            with self._log.open("ab") as log:
                self._child = Child(
                    "whet.cluster.host", self.name, environment=self._environment, stdout=log, stderr=log
                )
        except OSError as error:
            self._bury(f"its process could not be started: {error}")
            self._started.set()
            return
        self._started.set()
        _, write, read = self._threads
        write.start()
        read.start()
        code = self._child.wait()
        self._exited.set()
        read.join(1.0)  # what it said before it ended counts
        self._bury(describe_end(code))
        self._outbox.put(None)
        self._child.socket.close()

    def _bury(self, cause: str) -> None:
        with self._lock:
            self._cause = self._cause or cause
            calls, self._calls = list(self._calls.values()), {}
        self._clock.forget(self)
        for call in calls:
            call.done(None, call.error(self._cause, self._words()))
        self._gone.set()

    def _write(self) -> None:
        assert self._child is not None
        try:
            while (buffers := self._outbox.get()) is not None:
                send(self._child.socket, buffers)
        except OSError:
            pass  # it is gone, which `_live` sees too

    def _read(self) -> None:
        assert self._child is not None
        try:
            while True:
                self._take(decode(receive(self._child.socket)))
        except (EOFError, OSError):
            cause = "its process closed the connection to the driver"
        except (WireError, LookupError, TypeError) as error:
            cause = f"its process sent no proper answer: {error}"
        if not self._exited.wait(1.0):  # it lives on, deaf
            with self._lock:
                self._cause = self._cause or cause
            self._kill()

    def _take(self, message: dict[str, Any]) -> None:
        number, kind, value = message["number"], message["say"], message["value"]
        with self._lock:
            call = self._calls.get(number) if kind == "part" else self._calls.pop(number, None)
        if call is None:
            return  # a late answer
        if kind == "part":
            call.renew()
            call.part(value)
        elif kind == "done":
            call.done(value, None)
        else:
            call.done(None, call.error(f"{value['cause']} (see {self._log})", details=value["details"]))
