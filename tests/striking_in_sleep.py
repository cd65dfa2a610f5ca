"""A logger that kills a worker process of its run after a step: at a moment at which that one sleeps."""

import os
import signal
from collections.abc import Mapping

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.interfaces.logger import RunInfo
from whet_testing.processes import descendants


@frozen
class StrikingInSleepConfig:
    """Whom to kill, and when."""

    victim: str
    """Name of a worker process, e.g. `generator-1`."""
    step: int
    """After this one."""


_struck: set[str] = set()  # of the process: a run that begins again is not struck again


class StrikingInSleep:
    """Watches a run, and takes a part in it."""

    def __init__(self, config: StrikingInSleepConfig, run: RunInfo) -> None:
        self.config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Strike once."""
        victim = self.config.victim
        if step == self.config.step and victim not in _struck:
            _struck.add(victim)
            for process in descendants():
                if "whet.runtime.worker_process" in process.command and process.command.endswith(victim):
                    os.kill(process.pid, signal.SIGKILL)

    def status(self, text: str) -> None:
        """Nothing is shown."""

    def rewind(self, step: int) -> None:
        """Nothing is kept."""

    def close(self, failed: bool) -> None:
        """Nothing is open."""


@hookimpl
def whet_loggers() -> list[Component]:
    """Offer it."""
    return [Component("striking-in-sleep", StrikingInSleepConfig, f"{__name__}:StrikingInSleep")]
