"""Whether Ray still runs: the processes of a Ray that whet started, or the head of a cluster that the driver joined.

When the head is gone, calls of Ray block and cannot be cancelled; after a minute Ray ends the driver. whet notices the
loss itself, and earlier.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from importlib import import_module
from itertools import chain
from threading import Event, Thread
from typing import Any, Final, Protocol, TypeVar

from whet.errors import ClusterGone, WhetError
from whet.runtime.process import describe_end
from whet.runtime.threads import Guard
from whet.runtime.watchdog import kill_marked, watchdog

Answer = TypeVar("Answer")

_NEEDED: Final = ("raylet", "gcs_server")
_PROBE_SECONDS: Final = 5.0
_MOST_SILENT_SECONDS: Final = 30.0  # time to restart a head; after a minute without it, Ray ends this process


class Signs(Protocol):
    """Shows whether a Ray still runs."""

    every: float
    """Seconds between two checks."""

    def fault(self) -> str:
        """Return why Ray cannot be used any more, or "" while it runs."""


class OwnSigns:
    """Watches the processes of a Ray on this machine that this process has just started."""

    every = 0.2

    def __init__(self) -> None:
        node: Any = import_module("ray._private.worker")._global_node
        self._processes = {name: node.all_processes[name][0].process for name in _NEEDED}
        for info in chain.from_iterable(node.all_processes.values()):  # SIGTERM, with which Ray ends them, is blocked
            info.process.terminate = info.process.kill

    def fault(self) -> str:
        """Return which of Ray's processes has ended, and how, or "" while all of them run."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"Ray's {name} on this machine is gone: {describe_end(code)}"
        return ""

    def kill(self, name: str) -> None:
        """Kill one of Ray's processes. A process that is stopped, or that waits for a lost one, delays the shutdown."""
        self._processes[name].kill()

    def close(self) -> None:
        """Kill what still runs of Ray: the raylet's children, which outlive it by a minute."""
        kill_marked(own_mark())


class HeadSigns:
    """Watches the head of a cluster, at `host:port`."""

    every = 5.0

    def __init__(self, address: str) -> None:
        self._address, self._heard = address, time.monotonic()

    def fault(self) -> str:
        """Return for how long the head has accepted no connection, or "" where that is not too long yet."""
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
    """Knows whether Ray is lost, and calls Ray only while it is not. It can be used from any thread."""

    def __init__(self) -> None:
        self.lost: Future[str] = Future()
        """Done once Ray is lost; its result is the reason."""
        self._signs: Signs | None = None

    def watch(self, signs: Signs, until: Event) -> None:
        """Check at intervals whether Ray is lost. Return when the event `until` is set."""
        self._signs = signs
        guard = Guard("whet-ray")
        while not until.wait(signs.every) and not self.lost.done():
            with guard.item():
                self._look(signs)
        until.wait()

    def end(self, why: str) -> None:
        """Record that Ray is lost. Do nothing where the loss is known already."""
        with suppress(InvalidStateError):
            self.lost.set_result(why)

    def look(self) -> None:
        """Check now whether Ray is lost, where whet started it."""
        if isinstance(self._signs, OwnSigns):
            self._look(self._signs)

    def ask(self, question: Callable[[], Answer], seconds: float | None = None) -> Answer:
        """Call a function that may wait for Ray, and return its result. Raises `ClusterGone` where Ray is lost.

        Raises `WhetError` where the function takes too long; the thread that runs the function then stays behind.
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
            self.end(fault)


def own_mark() -> str:
    """Return the mark of all processes of a Ray that this process starts. The watchdog kills them by this mark."""
    return f"{watchdog().family}.ray"


def connect(address: str) -> None:
    """Connect to `host:port` and close the connection. Raises `OSError` where nothing listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except UnicodeError as error:  # e.g. two points in a row
        raise OSError(f"{host!r:.80} is no name of a machine") from error


def _answer(question: Callable[[], Answer], answer: "Future[Answer]") -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
