"""One thread that watches the deadlines of all calls to the processes of a cluster."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from whet.errors import in_words
from whet.runtime.connection import Alarm, Connection
from whet.runtime.threads import Guard, watched

_PATIENCE_FOR_WORDS = 1.5
"""How long to wait for the logs and stacks of processes that missed a deadline; enough for one on another node."""
_STOOD_STILL_SECONDS = 1.0
"""If a check is this late, the whole driver stood still, and did not receive what processes sent meanwhile."""


class DeadlineWatch:
    """The thread that watches the deadlines. It starts with the first connection."""

    def __init__(self, lost: Callable[[str], object] = lambda words: None) -> None:
        """Watch no connection yet. If the thread ends unexpectedly, `lost` is called with the reason.

        No deadline is watched then.
        """
        self._lost, self._guard = lost, Guard("whet-deadlines")
        self.alarm = Alarm()
        self._connections: set[Connection] = set()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def watch(self, connection: Connection) -> None:
        """Watch the deadlines of a connection until it is gone."""
        with self.alarm.changed:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = watched("whet-deadlines", self._run, self._lost, lambda: self._stopped)
            self.alarm.changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self.alarm.changed:
            self._stopped = True
            self.alarm.changed.notify()

    def _run(self) -> None:
        while not self._stopped:
            with self._guard.item():
                self._look()

    def _look(self) -> None:
        """Wait for the next deadline, and fail the calls that have missed theirs."""
        alarm = self.alarm
        with alarm.changed:
            alarm.at = math.inf  # a call that is made from here on waits for the lock, and then wakes this thread
            self._connections = {connection for connection in self._connections if not connection.gone}
            alarm.at = min((self._deadline_of(c) for c in list(self._connections)), default=math.inf)
            wait = alarm.at - time.monotonic()
            if wait > 0 and not self._stopped:
                alarm.changed.wait(min(wait, threading.TIMEOUT_MAX))
            if self._stopped:
                return
            connections = list(self._connections)
            if (late := time.monotonic() - alarm.at) > _STOOD_STILL_SECONDS:
                for connection in connections:
                    connection.excuse(late)
        overdue = []
        for connection in connections:
            try:
                connection.end_if_deaf()
                if connection.overdue:
                    overdue.append(connection)
            except Exception as error:  # a fault of one connection must not stop the watch over the others
                self._give_up(connection, error)
        _end_overdue(sorted(overdue, key=lambda c: (len(c.name), c.name)))

    def _deadline_of(self, connection: Connection) -> float:
        try:
            return connection.next_deadline()
        except Exception as error:
            self._give_up(connection, error)
            return math.inf

    def _give_up(self, connection: Connection, error: Exception) -> None:
        """Fail the calls of a connection whose deadlines cannot be watched: a call must not wait without a deadline."""
        self._guard.report(error)
        self._connections.discard(connection)
        words = f"its deadlines cannot be watched: {in_words(error)}"
        # A separate thread: `fail` calls functions of callers, which may watch a deadline while the lock is held.
        threading.Thread(target=connection.fail, args=(words,), name="whet-failing", daemon=True).start()


def _end_overdue(connections: Sequence[Connection]) -> None:
    """Fail the calls that have missed their deadlines, and begin with the processes that stand still.

    When ranks wait for each other, the process that stands still is the cause, and users see the first failure.
    """
    told = told_at_once([ask for connection in connections for ask in (connection.standstill, connection.last_words)])
    stands = dict(zip(connections, told[::2], strict=True))
    words = [(c.name, found) for c, found in zip(connections, told[1::2], strict=True) if found]
    shown = "\n".join(f"{name}:\n{found}" if len(connections) > 1 else found for name, found in words)
    for connection in sorted(connections, key=lambda c: not stands[c]):
        connection.end_overdue(stands[connection], shown)


def told_at_once(asks: Sequence[Callable[[], str]]) -> list[str]:
    """Call all of `asks` at the same time, and return their answers, which help to explain an error.

    An answer that is not there in time is empty. A failure here never hides the error, or ends the calling thread.
    """
    answers = [Future[str]() for _ in asks]

    def tell(ask: Callable[[], str], answer: "Future[str]") -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # for example of a launcher, a full disk, or a process that is gone by now
            answer.set_result(f"(nothing more is known: {in_words(error)})")

    for ask, answer in zip(asks, answers, strict=True):
        try:
            threading.Thread(target=tell, args=(ask, answer), name="whet-asking", daemon=True).start()
        except RuntimeError as error:  # no further thread can be started
            answer.set_result(f"(nothing more is known: {in_words(error)})")
    wait(answers, _PATIENCE_FOR_WORDS)
    return [answer.result() if answer.done() else "" for answer in answers]
