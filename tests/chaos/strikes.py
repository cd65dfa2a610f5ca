"""One disturbance of a run attempt: draw what, when and whom, wait for the moment, do it, and say what came of it."""

import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack

from attrs import define, field, frozen
from run_attempt import DEADLINE, SLOWNESS, START_DEADLINE, RunAttempt
from victims import Victim, victims

ACTS = {"kill": 14, "stop": 2, "pause": 1, "terminate": 2, "terminate all": 1, "interrupt": 1}
"""What may be done, and how often relative to the others."""
MOMENTS = {
    "starting": 2, "backend.start": 1, "generator.start": 1, "after.opened": 1, "rollout.take": 2,
    "generator.generate": 2, "backend.train": 2, "backend.weight_sync": 3, "run.save": 3, "run.write": 3,
    "after.step": 1,
    "after.saved": 1, "after.exported": 1, "after.closed": 1,
}  # fmt: skip
"""Phases at whose beginning a delay starts, after which it is done."""
ONCE = ("starting", "backend.start", "generator.start", "after.opened", "after.exported", "after.closed")
"""Those that come once in a run attempt."""
PATIENCE = 25.0 * SLOWNESS
"""Seconds for everything that an ending run has to do, on a busy machine."""
PAUSE = 2.0


@frozen
class Strike:
    """What is done, to whom and when."""

    act: str
    victim: str
    moment: str
    count: int
    """How often the phase begins before."""
    delay: float
    """Seconds from there."""

    def __str__(self) -> str:
        return f"{self.act} {self.victim}"

    @property
    def survived(self) -> bool:
        """Whether a run should go on, so that its run attempt can be struck again."""
        return self.act == "pause" or (self.act in ("kill", "stop") and self.victim != "driver")

    @property
    def bound(self) -> float:
        """Seconds in which a run that cannot go on must have ended."""
        waits = START_DEADLINE if self.moment in ("starting", "backend.start", "generator.start") else DEADLINE
        return PATIENCE + (waits if self.act in ("stop", "pause") else DEADLINE)


@define
class Struck:
    """What came of it."""

    strike: Strike
    hit: str = ""
    """Name of the process that it was done to; empty where the run was over before."""
    phase: str = ""
    """Of the driver at that time."""
    code: int | None = None
    seconds: float = 0.0
    """From the strike to the end of the run, or to its going on."""
    said: str = ""
    faults: list[str] = field(factory=list)
    outcome: str = ""
    workers: list[tuple[str, str]] = field(factory=list)
    """Workers that were hit in this run attempt, with the phase of the driver."""


def draw(random_: random.Random, names: list[str], durations: Mapping[str, float]) -> Strike:
    """Draw a strike at one of the processes with these names; `durations` are those of an undisturbed run's phases."""
    act = random_.choices(list(ACTS), list(ACTS.values()))[0]
    victim = "driver" if act in ("terminate", "interrupt", "pause") else random_.choice(names)
    moment = random_.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    count = 0 if moment in ONCE else random_.randint(0, 2)
    if act == "stop" and victim in ("driver", "watchdog"):
        act = "kill"  # a run whose driver stands still, stands still
    if act == "terminate all":
        victim = "all"
    delay = random_.random() * (4.0 if moment == "starting" else max(0.003, durations.get(moment, 0.05)))
    return Strike(act, victim, moment, count, delay)


def carry_out(strike: Strike, attempt: RunAttempt, again: bool) -> Struck:
    """Wait for the moment of a strike, do it, and wait for what comes of it.

    `again`: the run attempt will be struck again, so where the run should go on, nothing is waited for.
    """
    struck = Struck(strike)
    with ExitStack() as stack:
        found = _await_moment(strike, attempt, stack)
        if found is not None:
            struck.phase = attempt.phase()
            began = time.monotonic()
            struck.hit = _do(strike, attempt, found)
            if strike.survived and struck.hit == strike.victim and again:
                struck.outcome = "under way"
                return struck
            struck.code = attempt.wait(100.0 * SLOWNESS)
            struck.seconds = time.monotonic() - began
            if struck.code == 0 and struck.hit == "driver" and strike.act in ("kill", "stop"):
                struck.hit = ""  # no process survives SIGKILL: this one had ended, and was only not waited for yet
        else:
            struck.code = attempt.wait(100.0 * SLOWNESS)
    struck.said = attempt.said()
    return struck


def _await_moment(strike: Strike, attempt: RunAttempt, stack: ExitStack) -> list[Victim] | None:
    """Wait until it is time; give the processes that are there. None: the run was over before."""
    found: list[Victim] = []
    looked, at = 0.0, None
    began = attempt.moments.read_text()
    moment = strike.moment if not began or strike.moment not in ONCE[:4] else "rollout.take"
    if moment == "starting":
        at = time.monotonic() + strike.delay
    begin, size = f" begin {moment}\n", 0
    before = began.count(begin)
    while True:
        now = time.monotonic()
        if at is not None and now >= at:
            break
        if attempt.process.poll() is not None:
            return None
        if at is None and (grown := attempt.moments.stat().st_size) != size:
            size = grown
            if attempt.moments.read_text().count(begin) - before > strike.count:
                at = now + strike.delay
                continue
        if now - looked > 0.25 and (at is None or at - now > 0.1):
            looked = now
            found = _look(stack)
        time.sleep(0.0005)
    return found or _look(stack)


def _look(stack: ExitStack) -> list[Victim]:
    found = list(victims())
    for victim in found:
        stack.callback(victim.close)
    return found


def _do(strike: Strike, attempt: RunAttempt, found: list[Victim]) -> str:
    """Do it, and give the name of the one whom it hit; where that one is not there, it hits the driver."""
    if strike.act == "terminate all":
        for victim in found:
            victim.strike(signal.SIGTERM)
        return "all"
    number = {
        "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "terminate": signal.SIGTERM,
        "interrupt": signal.SIGINT,
    }[strike.act]  # fmt: skip
    for victim in found:
        if victim.name == strike.victim != "driver" and victim.strike(number):
            return victim.name
    driver = attempt.process.pid
    if strike.act == "stop":
        number = signal.SIGKILL
    try:
        os.kill(driver, number)
        if strike.act == "pause":
            time.sleep(PAUSE)
            os.kill(driver, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    return "driver"
