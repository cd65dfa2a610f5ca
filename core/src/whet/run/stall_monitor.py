"""Reports long waits of the driver: a line on stderr that names the waiting role and the role it waits for, and stacks
in `logs/waits.log`.

rollout.take since 63 s: generator-1 generate since 62 s (its process computes decode since 61 s, heard of 1 s ago)

A wait is a phase of the driver's spans. It is reported when it has lasted `cluster.deadlines.notice` and twice as long
as the longest of its kind before, and again each time that its length has doubled. Nothing is ended: deadlines do that.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.files import disk_errors
from whet.data.spans import Spans
from whet.runtime.threads import Guard, watched

if TYPE_CHECKING:
    from whet.runtime.launcher import Cluster

LOOKS = 8
"""How often a wait is looked at before it is reported."""
SLOWEST_LOOK_SECONDS = 5.0
BACKGROUND = frozenset({"generate", "write"})
"""Phases that go on in the background. The driver does not wait for them."""
DEEPEST_STACK = 12


class StallMonitor:
    """A thread that looks for long waits at intervals."""

    def __init__(self, spans: Spans, log: Path, notice_seconds: float, cluster: "Cluster | None" = None) -> None:
        """`notice_seconds` 0: nothing is reported. `cluster`: the workers, if they are processes."""
        self._spans, self._log, self._notice, self._cluster = spans, log, notice_seconds, cluster
        self.episodes: Callable[[], list[str]] = list
        """Returns the states of the episodes under way."""
        self._told: dict[tuple[str, str, float], float] = {}
        """Seconds after which a wait under way is reported next, by role, phase and begin."""
        self._over = threading.Event()
        self._thread = watched("whet-stall-monitor", self._watch, over=self._over.is_set) if notice_seconds else None

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def look(self) -> None:
        """Report the waits that are due."""
        waits = [wait for wait in self._spans.under_way() if wait.phase not in BACKGROUND]
        alive = {(wait.role, wait.phase, wait.since) for wait in waits}
        self._told = {wait: seconds for wait, seconds in self._told.items() if wait in alive}
        due = []
        for wait in waits:
            key, seconds = (wait.role, wait.phase, wait.since), time.perf_counter() - wait.since
            if seconds >= self._told.get(key, max(self._notice, 2 * self._spans.longest(wait.role, wait.phase))):
                self._told[key] = 2 * seconds
                due.append(f"{wait.role}.{wait.phase} since {seconds:.0f} s")
        if due:
            self._tell(due)

    def _tell(self, due: list[str]) -> None:
        owed = [str(one) for one in self._cluster.under_way()] if self._cluster else []
        places = self.episodes()
        episodes = [f"episodes: {', '.join(places)}"] if places else []
        line = f"waiting on {', '.join(due)}: {'; '.join(owed + episodes) or 'no worker owes an answer'}"
        print(f"{line}; stacks are in {self._log}", file=sys.stderr, flush=True)
        parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", *driver_stacks()]
        if self._cluster is not None:
            parts += [f"{name}:\n{words}" for name, words in self._cluster.stacks().items() if words]
        with disk_errors(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8", errors="replace") as file:
                file.write("\n".join(parts) + "\n\n")

    def _watch(self) -> None:
        pause = min(self._notice / LOOKS, SLOWEST_LOOK_SECONDS)
        guard = Guard("whet-stall-monitor", pause_seconds=0.0)
        while not self._over.wait(pause):
            try:
                self.look()
            except Exception as error:  # no error ends the run or this monitor
                guard.report(error)


def driver_stacks() -> list[str]:
    """Return where the driver's main thread is, and the one that plays episodes."""
    frames = sys._current_frames()
    return [
        f"driver, {thread.name}:\n" + "".join(traceback.format_stack(frame)[-DEEPEST_STACK:]).rstrip()
        for thread in sorted(threading.enumerate(), key=lambda thread: thread.name)
        if thread.name in ("MainThread", "whet episodes") and (frame := frames.get(thread.ident or 0))
    ]
