"""Find the processes of a run by what they are, and send them signals."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress

from attrs import frozen

from whet_testing.processes import Process, descendants

FORK_SERVER = "fork server"
KINDS = (
    (re.compile(r"-m whet\.runtime\.worker_process .* (\S+-\d+)$"), "{}"),
    (re.compile(r"-m whet\.runtime\.forkserver "), FORK_SERVER),
    (re.compile(r"-m whet_sandbox\.grader "), "grader"),
    (re.compile(r"whet/runtime/watchdog\.py "), "watchdog"),
    (re.compile(r"-m whet\.cli run "), "driver"),
    (re.compile(r"/raylet/raylet "), "raylet"),
    (re.compile(r"/gcs/gcs_server "), "gcs_server"),
    (re.compile(r"^ray::NodeAgent"), "node agent"),
)
"""Command lines and the names of what runs them."""


@frozen
class Victim:
    """A process that a signal can be sent to, and to no other that got its number later."""

    name: str
    pid: int
    descriptor: int

    def strike(self, number: signal.Signals) -> bool:
        """Send a signal; whether it was still there."""
        try:
            signal.pidfd_send_signal(self.descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self.descriptor)


def named(process: Process) -> str:
    """Return the role or the part that a process is. Empty: it belongs to no run."""
    for pattern, name in KINDS:
        if found := pattern.search(process.command):
            return name.format(*found.groups())
    return ""


def victims() -> Iterator[Victim]:
    """Find all processes of runs that descend from this process."""
    for process in sorted(descendants()):
        if name := named(process):
            with suppress(ProcessLookupError):
                yield Victim(name, process.pid, os.pidfd_open(process.pid))
