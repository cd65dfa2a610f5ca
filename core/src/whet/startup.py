"""The time until the first step of a sitting is over, and what took it."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from attrs import define, field

from whet.spans import Span

TOTAL = "seconds/startup"
"""The metric of the whole time; its parts are `seconds/startup.PART`."""
BEFORE = frozenset({"load plugins", "config", "prepare", "start", "load"})
"""Phases that come before the first step and are no part of it."""
_OUTERMOST = BEFORE | {"refit", "probe", "evaluate"}
"""Phases before the first step that do not lie within each other."""


@define
class Startup:
    """Adds up what happened before the first step, and that step, from `began` on."""

    began: float
    """Seconds since the epoch."""
    _parts: dict[str, float] = field(factory=dict, init=False)
    _over: bool = field(default=False, init=False)

    def metrics(self, spans: Iterable[Span], step_seconds: float, first: bool) -> dict[str, float]:
        """Take what a record is made of. Gives the metrics with the first step, and nothing before and after."""
        if self._over:
            return {}
        step_began = time.time() - step_seconds
        for span in spans:
            if span.phase in _OUTERMOST and not (first and span.begin >= step_began):
                name = span.phase if span.role == "run" else f"{span.role}.{span.phase}"
                self._parts[name] = self._parts.get(name, 0.0) + span.seconds
        if not first:
            return {}
        self._over = True
        total = time.time() - self.began
        parts = {**self._parts, "first step": step_seconds}
        parts["other"] = max(0.0, total - sum(parts.values()))
        return {TOTAL: round(total, 3), **{f"{TOTAL}.{name}": round(value, 3) for name, value in parts.items()}}


def process_began() -> float:
    """Give the time when this process was started, in seconds since the epoch; where nobody tells, the present."""
    now = time.time()
    try:
        started = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
