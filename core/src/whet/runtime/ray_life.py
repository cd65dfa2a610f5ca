"""Whether Ray still lives: the processes of one that whet started, or the head of a cluster that was joined.

Ray itself waits for a head that is gone for a minute, in calls that nothing ends, and then ends the driver.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, Protocol, TypeVar

from whet.errors import ClusterGone, WhetError
from whet.runtime.process import describe_end
from whet.runtime.threads import Guard
from whet.runtime.watchdog import close_pidfd, kill_pidfd, pidfd, watchdog

Answer = TypeVar("Answer")

_NEEDED: Final = ("gcs_server", "raylet")
_PROBE_SECONDS: Final = 5.0
_MOST_SILENT_SECONDS: Final = 30.0  # a head may be started anew, but Ray ends this process after a minute


class Signs(Protocol):
    """Signs of life of a Ray."""

    every: float
    """Seconds between two looks."""

    def fault(self) -> str:
        """Say why it cannot be used any more; empty while it lives."""
        ...


class OwnSigns:
    """Of a Ray on this machine that this process has just started."""

    every = 0.2

    def __init__(self) -> None:
        node: Any = import_module("ray._private.worker")._global_node
        self._processes = {name: node.all_processes[name][0].process for name in _NEEDED}
        self._agents = {pid: pidfd(pid) for pid in _children(self._processes["raylet"].pid)}
        """Of the raylet, which they outlive by a minute and more."""
        for pid in self._agents:
            watchdog().guard("process", str(pid))

    def fault(self) -> str:
        """Say which of its processes has ended, and how."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"Ray's {name} on this machine is gone: {describe_end(code)}"
        return ""

    def kill(self) -> None:
        """End its processes: one that stands still, or waits for one that is gone, holds up whoever takes leave."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """End what is left when they have ended."""
        for pid, descriptor in self._agents.items():
            kill_pidfd(descriptor)
            close_pidfd(descriptor)
            watchdog().release("process", str(pid))
        self._agents = {}


class HeadSigns:
    """Of the head of a cluster, at `host:port`."""

    every = 5.0

    def __init__(self, address: str) -> None:
        self._address, self._heard = address, time.monotonic()

    def fault(self) -> str:
        """Say for how long it has answered nobody, if that is too long."""
        try:
            connect(self._address)
        except OSError as error:
            silent = time.monotonic() - self._heard
            if silent > _MOST_SILENT_SECONDS:
                where = f"{self._address} (cluster.address)"
                return f"Ray's gcs_server at {where} has not answered for {silent:.0f} s: {error}"
        else:
            self._heard = time.monotonic()
        return ""


class Life:
    """Knows whether Ray is lost, and asks it only as long as it is not. May be used from any thread."""

    def __init__(self) -> None:
        self.lost: Future[str] = Future()
        """Done once Ray cannot be used any more; why."""
        self._signs: Signs | None = None

    def watch(self, signs: Signs, until: Event) -> None:
        """Look for signs of life until it is left."""
        self._signs = signs
        guard = Guard("whet-ray")
        while not until.wait(signs.every) and not self.lost.done():
            with guard.item():
                self._look(signs)
        until.wait()

    def look(self) -> None:
        """Look now."""
        if isinstance(self._signs, OwnSigns):
            self._look(self._signs)

    def ask(self, question: Callable[[], Answer], seconds: float | None = None) -> Answer:
        """Give the answer to what may wait for Ray. Raises `ClusterGone` where Ray is lost meanwhile.

        Who is not answered in time, which raises `WhetError`, leaves a thread behind.
        """
        self.look()
        answer: Future[Answer] = Future()
        if self.lost.done():
            raise ClusterGone(self.lost.result())
        Thread(target=_answer, args=(question, answer), name="whet-asks-ray", daemon=True).start()
        either: list[Future[Any]] = [answer, self.lost]
        wait(either, seconds, FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self.lost.done():
            raise ClusterGone(self.lost.result())
        raise WhetError(f"Ray gave no answer within {seconds:g} s")

    def _look(self, signs: Signs) -> None:
        if not self.lost.done() and (fault := signs.fault()):
            with suppress(InvalidStateError):  # another thread saw it as well
                self.lost.set_result(fault)


def _children(process: int) -> list[int]:
    """Give the processes that one has started. Linux; elsewhere none are seen."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    try:
        return [int(child) for one in lists for child in one.read_text().split()]
    except OSError:  # it has ended
        return []


def connect(address: str) -> None:
    """Connect to `host:port` and leave. Raises `OSError` where nobody answers."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _answer(question: Callable[[], Answer], answer: "Future[Answer]") -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
