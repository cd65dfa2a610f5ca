"""The driver's end of one worker process: its open calls, their answers, and the end of the process.

One thread for each process starts the process and waits for its end. The kernel ties a process of the driver's machine
to this thread. The messages of all processes pass through the one thread of `whet.runtime.traffic`. One thread of
`whet.runtime.deadlines` watches all deadlines.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define, field, frozen

from whet.errors import ClusterGone, ClusterLost, WhetError, WorkerError, WorkerLost
from whet.runtime.hosts import HostProcess
from whet.runtime.last_words import TRACEBACK, last_words
from whet.runtime.threads import watched
from whet.runtime.traffic import Traffic
from whet.runtime.wire import Buffer, decode, encode

_PATIENCE_FOR_STACKS = 0.1
_PATIENCE_FOR_AN_END = 5.0  # longer than it takes to find out why a node was lost
_PATIENCE_FOR_LAST_ANSWERS = 1.0
_PATIENCE_FOR_A_KILL = 10.0
_DEEPEST_STACK = 20
_MOMENT_SECONDS = 0.05
_STANDSTILLS = {"T": "; its process is stopped", "D": "; its process waits for a disk or another device"}
_SLOWEST_BEAT_SECONDS = 5.0
_MOST_BEATS_A_SECOND = 32
"""Heartbeats of all processes together, if their deadline allows so few."""
_OVER = ("done", "failed")
"""The kinds of message that end a call."""
_IDLE = ("runtime/channel.py", "/selectors.py", "runtime/worker_process.py")
"""Files in which an idle thread of a worker process waits."""


@define(eq=False)
class Call:
    """A request to a worker, until it is answered."""

    role: str
    rank: int
    phase: str
    timeout_seconds: float
    """Limit for the answer, or for each item of a stream."""
    done: Callable[[Any, WorkerError | None], None]
    """Called once, with the result or the error.

    The threads that serve all calls call `done` and `part`, so neither may wait.
    """
    part: Callable[[Any], None] = lambda item: None
    """Called with each item of a stream."""
    missed: Callable[[WorkerError], None] = lambda error: None
    """Called when the deadline has passed."""
    began: float = field(factory=time.monotonic, init=False)
    expires: float = Factory(lambda call: time.monotonic() + call.timeout_seconds, takes_self=True)

    def error(self, cause: str, words: str = "", details: str = "") -> WorkerError:
        """Return the error for the failure of this call."""
        return WorkerError(self.role, self.rank, self.phase, cause, words, details)

    def lost(self, cause: str, words: str = "", kind: type[WorkerLost] = WorkerLost) -> WorkerLost:
        """Return the error for the loss of this call's process."""
        return kind(self.role, self.rank, self.phase, cause, words)


@frozen
class InFlightCall:
    """A call that a worker process has not answered yet."""

    role: str
    rank: int
    phase: str
    seconds: float
    """Seconds since the call began. For several calls of one phase: since the oldest began."""
    doing: str
    """What the compute thread of the process does, as the process last reported; empty: nothing."""
    doing_seconds: float
    """Seconds since the compute thread began to do this."""
    silence_seconds: float
    """Seconds since the driver last received anything from the process."""

    def __str__(self) -> str:
        said = f"computes {self.doing} since {self.doing_seconds:.0f} s" if self.doing else "computes nothing"
        heard = f"{said}, heard of {self.silence_seconds:.0f} s ago"
        return f"{self.role}-{self.rank} {self.phase} since {self.seconds:.0f} s (its process {heard})"


@define(eq=False)
class Alarm:
    """When the deadlines of all connections are checked next; see `whet.runtime.deadlines`."""

    at: float = math.inf
    """In seconds of `time.monotonic`. Until then the thread that checks waits for `changed`."""
    changed: threading.Condition = field(factory=threading.Condition)


class Connection:
    """One worker process. Its start begins at once, in the background."""

    def __init__(self, name: str, log: Path, process: HostProcess, alarm: Alarm, traffic: Traffic) -> None:
        self.name, self.process, self._log, self._alarm = name, process, log, alarm
        log.touch()
        self._log_begin = log.stat().st_size
        self._calls: dict[int, Call] = {}
        self.slots: set[int] = set()
        """The spawns whose workers live in the process."""
        self._line = process.line(traffic, self._take, self.doubt, self._hear)
        self._lock = threading.Lock()
        self._gone = threading.Event()
        """Set when no call can come any more: the process has ended, or was never started."""
        self._exited = False
        self._cause = ""
        """Why the process can no longer be used; empty while it can."""
        self._left = False
        """Whether the process was asked to end, was never started, or was given up because of a fault of the driver."""
        self._loss = WorkerLost
        """The class of the error that calls get when the process is lost."""
        self._deaf_until, self._deaf_cause = math.inf, ""
        """When and why to kill a process that has lost its connection and has not ended."""
        self._heartbeat_seconds = 0.0
        self._heard, self._said = 0.0, ("", 0.0)
        self._started = threading.Event()
        watched(f"whet-{name}", self._live, self.fail, lambda: self._gone.is_set())

    def loss(self, call: Call, patience_seconds: float) -> WorkerError | None:
        """Return the error that `call` gets if the process is lost within this time. None: it is not."""
        if not self._gone.wait(patience_seconds) or self._left:
            return None
        return self._ended(call)

    @property
    def gone(self) -> bool:
        """Return whether the process has ended, or was never started, and every call has failed."""
        return self._gone.is_set()

    @property
    def dead(self) -> bool:
        """Return whether the process is gone, or is about to end."""
        return bool(self._cause)

    @property
    def pid(self) -> int:
        """Wait for the start and return the process id; 0 if the start failed."""
        self._started.wait()
        return self.process.pid

    def ask(self, number: int, buffers: Sequence[Buffer], call: Call) -> None:
        """Send a message whose answer `call` waits for. If the process is dead, the call fails at once."""
        with self._lock:
            cause = self._cause
            if not cause:
                self._calls[number] = call
                self._line.send(buffers)
        if cause:
            call.done(None, self._ended(call))
        elif call.expires < self._alarm.at:
            self._check_earlier()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        self._line.send(encode(message))

    def expect_heartbeats(self, seconds: float, processes: int = 1) -> None:
        """Ask the process for heartbeats, and kill it after `seconds` without any message from it.

        The limit applies from its first message on. The interval between heartbeats grows with the number of
        `processes` of the cluster.
        """
        self._heartbeat_seconds = seconds
        self.tell(
            {"do": "beat", "every": min(seconds / 4, max(_SLOWEST_BEAT_SECONDS, processes / _MOST_BEATS_A_SECOND))}
        )

    def under_way(self) -> "list[InFlightCall]":
        """Return the calls that the process has not answered: the oldest of each role, rank and phase, oldest first."""
        now = time.monotonic()
        with self._lock:
            calls = list(self._calls.values())
            heard, (doing, since) = self._heard, self._said
        oldest: dict[tuple[str, int, str], Call] = {}
        for call in sorted(calls, key=lambda call: call.began):
            oldest.setdefault((call.role, call.rank, call.phase), call)
        silence = now - heard if heard else 0.0
        return [InFlightCall(*who, now - call.began, doing, now - since, silence) for who, call in oldest.items()]

    def excuse(self, seconds: float) -> None:
        """Subtract `seconds` from the silence of the process, because the driver could not hear it meanwhile."""
        with self._lock:
            self._heard += seconds if self._heard else 0.0
            self._deaf_until += seconds

    def doubt(self, cause: str) -> None:
        """Wait a few seconds for the process to end by itself after its connection broke, then kill it.

        The way in which a process ends tells more than a broken connection.
        """
        with self._lock:
            if self._exited:
                return
            self._deaf_until, self._deaf_cause = time.monotonic() + _PATIENCE_FOR_AN_END, cause
        self._check_earlier()

    def drop(self, number: int) -> None:
        """Stop waiting for the answer to a call."""
        with self._lock:
            self._calls.pop(number, None)

    def busy(self, role: str | None = None) -> bool:
        """Return whether calls of a role are under way. None: calls of any role."""
        with self._lock:
            return any(role in (None, call.role) for call in self._calls.values())

    def exit(self, slot: int) -> bool:
        """Record that the workers of a spawn are gone. Ask the process to end, and return True, after the last."""
        self.slots.discard(slot)
        last = not self.slots
        if last:
            self.leave()
        return last

    def leave(self) -> None:
        """Ask the process to end."""
        with self._lock:
            self._left = self._left or not self._cause
            self._cause = self._cause or "its process was closed"
        self.tell({"do": "exit"})

    def gone_by(self, deadline: float) -> bool:
        """Wait for the end of the process until `deadline`, in the seconds of `time.monotonic`. Return if it ended."""
        return self._gone.wait(max(0.0, deadline - time.monotonic()))

    def kill(self, reason: WorkerError) -> None:
        """Kill the process because of a failure. Every call under way fails."""
        with self._lock:
            self._cause = self._cause or f"its process was ended because {str(reason).splitlines()[0]}"
        self.process.kill()

    def fail(self, words: str) -> None:
        """Fail every call because of a fault of the driver, and kill the process. A restart would not help."""
        self._left = True
        self._bury(words)
        self._started.set()
        self.process.kill()

    def next_deadline(self) -> float:
        """Return the earliest time at which a call misses its deadline, or the process has been silent for too long."""
        with self._lock:
            return min(self._deaf_until, self._silent_at(), *(call.expires for call in self._calls.values()))

    @property
    def overdue(self) -> bool:
        """Return whether a deadline has passed. A deadline that passes within a moment counts as well.

        So calls that were made together are overdue together.
        """
        return self.next_deadline() <= time.monotonic() + _MOMENT_SECONDS

    def end_if_deaf(self) -> None:
        """Kill the process if it lost its connection and has not ended in time."""
        with self._lock:
            if self._deaf_until > time.monotonic() + _MOMENT_SECONDS:
                return
            self._deaf_until = math.inf
            self._cause = self._cause or self._deaf_cause
        self.process.kill()

    def standstill(self) -> str:
        """Return why the kernel does not schedule the process; empty if it does."""
        return _STANDSTILLS.get(self.process.state(), "")

    def last_words(self) -> str:
        """Return the end of the process's log and the stacks of its busy threads."""
        return "\n".join(filter(None, (last_words(self._log, self._log_begin), self._stacks())))

    def end_overdue(self, standstill: str, words: str) -> None:
        """Fail the calls that have missed their deadlines, and end their processes."""
        latest = time.monotonic() + _MOMENT_SECONDS
        with self._lock:
            silent = self._silent_at() <= latest
            numbers = [number for number, call in self._calls.items() if silent or call.expires <= latest]
            calls = [self._calls.pop(number) for number in numbers]
            silence = f"no sign of life for {self._heartbeat_seconds:g} s{standstill}"
            if silent:
                self._cause = self._cause or f"its process gave {silence}"
        for call in calls:
            error = call.lost(silence if silent else f"no answer within {call.timeout_seconds:g} s{standstill}", words)
            call.done(None, error)
            call.missed(error)
        if silent:
            self.process.kill()

    def _check_earlier(self) -> None:
        """Wake the thread that checks the deadlines before its time."""
        with self._alarm.changed:
            self._alarm.changed.notify()

    def _silent_at(self) -> float:
        """Return the time at which the process will have been silent for too long."""
        if not self._heard or not self._heartbeat_seconds or self._cause:
            return math.inf
        return self._heard + self._heartbeat_seconds

    def _stacks(self) -> str:
        """Return the stacks of the busy threads of the process, if it can still write them."""
        if not self._heard:
            return ""  # the process may not handle the signal yet
        begin = self._log.stat().st_size if self._log.exists() else 0
        self.process.show_stacks()
        time.sleep(_PATIENCE_FOR_STACKS)
        # A call that fails meanwhile writes its traceback after the stacks; the words before have the whole of it.
        written = last_words(self._log, begin, lines=1000).partition(TRACEBACK)[0].rstrip()
        threads = [thread.splitlines() for thread in written.split("\n\n")]
        busy = [lines for lines in threads if not any(place in line for place in _IDLE for line in lines[1:2])]
        return "\n".join(line for lines in busy for line in lines[:_DEEPEST_STACK])

    def _live(self) -> None:
        try:
            connection = self.process.start()
        except ClusterGone as error:
            self._lose_all(error)
            self._started.set()
            return
        except (OSError, WhetError) as error:
            self._left = True
            self._bury(f"its process could not be started: {error}")
            self._started.set()
            return
        self._started.set()
        self._line.open(connection)
        try:
            cause = self.process.wait()
        except ClusterGone as error:
            self._lose_all(error)
        else:
            with self._lock:
                self._exited, self._deaf_until = True, math.inf
            self._line.over.wait(_PATIENCE_FOR_LAST_ANSWERS)  # answers that the process sent before its end count
            self._bury(cause)
        self._line.close()

    def _lose_all(self, error: ClusterGone) -> None:
        self._loss = ClusterLost
        self._bury(str(error))

    def _bury(self, cause: str) -> None:
        with self._lock:
            self._cause = self._cause or cause
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.done(None, self._ended(call))
        self._gone.set()

    def _ended(self, call: Call) -> WorkerError:
        words = last_words(self._log, self._log_begin)
        return call.error(self._cause, words) if self._left else call.lost(self._cause, words, self._loss)

    def _hear(self) -> None:
        """Record a sign of life: bytes have arrived, perhaps of a long message that is not complete."""
        if self._heard:
            self._heard = time.monotonic()

    def _take(self, buffers: Sequence[Buffer]) -> None:
        message = decode(buffers)
        number, kind, value = message["number"], message["say"], message["value"]
        now = time.monotonic()
        first, self._heard = not self._heard, now
        if first and self._heartbeat_seconds:
            self._check_earlier()
        if kind == "alive":
            self._said = value["doing"], now - value["seconds"]
            return
        with self._lock:
            call = self._calls.pop(number, None) if kind in _OVER else self._calls.get(number)
        if call is None:
            return  # a late answer
        if kind == "part":
            call.expires = now + call.timeout_seconds
            call.part(value)
        elif kind == "done":
            call.done(value, None)
        else:
            call.done(None, call.error(f"{value['cause']} (see {self._log})", details=value["details"]))


def end_all(connections: Sequence[Connection], deadline: float) -> None:
    """Wait for the ends of processes. Kill at `deadline` the ones that still run, all at once."""
    late = [connection for connection in connections if not connection.gone_by(deadline)]
    for connection in late:
        connection.process.kill()
    patience = time.monotonic() + _PATIENCE_FOR_A_KILL
    for connection in late:
        connection.gone_by(patience)
