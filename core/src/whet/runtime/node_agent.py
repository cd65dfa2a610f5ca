"""Stands by one host process on a node of a Ray cluster: an actor that starts it, passes on its output, and ends it.

    driver ── Connection ──────── TCP ─────────> worker_process      the same as on the driver's own machine
       └───── RayProcess ── TCP ── Keeper ── child, output, signals ──┘

The host is a process of its own rather than the actor's: it ends with a code or a signal that is known, its stacks can
be seen while its interpreter is stuck, and its threads, imports and environment are not Ray's. Only builtins cross Ray.
"""

import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from whet.errors import ConfigError, WhetError, in_words
from whet.runtime.channel import receive, send
from whet.runtime.door import knock
from whet.runtime.forked import Forked, NoForkServer, fixed
from whet.runtime.interpreters import faults, probe
from whet.runtime.ports import reserve
from whet.runtime.process import Child, on_loopback, worker_environment
from whet.runtime.threads import watched
from whet.runtime.watchdog import watchdog
from whet.runtime.wire import decode, encode

OURS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONBREAKPOINT")
"""Variables that Ray set for its own processes, and that its guests have no business with."""
_PATIENCE_FOR_OUTPUT = 2.0
_PATIENCE_FOR_AN_END = 5.0
_PATIENCE_FOR_RAY = 2.0


class Keeper:
    """The actor. `keep` returns at once, so that Ray can always ask it something."""

    def keep(self, order: dict[str, Any]) -> dict[str, Any]:
        """Connect to the driver and start the host; give this node's versions, or say under `error` why not."""
        found = {**versions(), "error": ""}
        if {key: found[key] for key in order["versions"]} != order["versions"]:
            return found  # the driver says what differs
        if words := _unfit(order["python"]):
            return {**found, "error": words}
        try:
            address, token, name = tuple(order["address"]), order["token"], order["name"]
            control, connection = (knock(address, token, f"{name}/{end}") for end in ("control", "host"))
        except (OSError, EOFError, WhetError) as error:
            return {**found, "error": f"the driver at {address[0]}:{address[1]} cannot be reached: {in_words(error)}"}
        Keeping(control, connection, order).begin()
        return found

    def ping(self) -> None:
        """Answer; Ray says why where it cannot."""


class Keeping:
    """One host process and the connection over which the driver commands it."""

    def __init__(self, control: socket.socket, connection: socket.socket, order: Mapping[str, Any]) -> None:
        self._control, self._connection, self._order = control, connection, order
        self._sending, self._started, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._child: Child | Forked | None = None
        self._held: socket.socket | None = None
        """Keeps the system from giving others the port where ranks are about to meet."""

    def begin(self) -> None:
        """Start the process from a thread that lives as long as it may."""
        watched("whet-keeper", self._live, self._lost, self._over.is_set)
        watched("whet-keeper-orders", self._obey, self._lost)

    def _live(self) -> None:
        watchdog().detached = True  # Ray kills the children of an actor that ends, but not those that they started
        try:
            self._child, output = self._start()
        except OSError as error:
            self._started.set()
            self._over.set()
            self._say(ended=f"its process could not be started: {error}")
            return
        self._started.set()
        self._say(started=self._child.pid)
        pump = watched("whet-keeper-log", lambda: self._pass_on(output), self._lost, lambda: True)
        end = self._child.end()
        self._over.set()
        pump.join(_PATIENCE_FOR_OUTPUT)  # its last words come before its end
        self._say(ended=end)

    def _lost(self, words: str) -> None:
        """End the process, and say why: without this thread nobody would hear of it, or end it."""
        self._started.set()
        self._say(ended=words)
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _start(self) -> tuple[Child | Forked, IO[bytes]]:
        """Start the process, by a fork where the driver is on this machine and has a server for it."""
        name, server = self._order["process"], self._order["fork_server"]
        reading, writing = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        with writing:
            try:
                return self._forked(name, server, writing.fileno()), reading
            except NoForkServer:
                child = Child(
                    "whet.runtime.worker_process", name, environment=self._environment(),
                    stdout=writing, stderr=writing,
                    connection=self._connection, python=self._order["python"],
                )  # fmt: skip
                return child, reading

    def _forked(self, name: str, server: str, output: int) -> Forked:
        if not server:
            raise NoForkServer("the driver has none")
        return Forked(
            server, name, environment=fixed(self._environment()), output=output, connection=self._connection,
            patience_seconds=self._order["patience_seconds"],
        )  # fmt: skip

    def _meeting_point(self) -> int | str:
        """Hold a port where ranks can meet; why there is none."""
        try:
            self._held = reserve(self._control.getsockname()[0])
        except WhetError as error:
            return str(error)
        port: int = self._held.getsockname()[1]
        return port

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in OURS}
        own = on_loopback(own) if self._order["one_machine"] else own
        gpus = own.get("CUDA_VISIBLE_DEVICES", "") if self._order["gpu"] else ""
        return {**worker_environment(own, self._order["threads"], gpus), **self._order["environment"]}

    def _pass_on(self, output: IO[bytes]) -> None:
        while words := os.read(output.fileno(), 1 << 16):
            self._say(output=words)

    def _obey(self) -> None:
        """Do what the driver says; without a driver, end the process and this one."""
        try:
            while True:
                said = decode(receive(self._control))
                order, number = said["do"], said["number"]
                self._started.wait()
                if self._child is not None and order == "kill":
                    self._child.signal(signal.SIGKILL)
                elif self._child is not None and order == "stacks":
                    self._child.show_stacks()
                elif self._child is not None and order == "state":
                    self._say(number=number, answer=self._child.state())
                elif order == "port":
                    self._say(number=number, answer=self._meeting_point())
        except (EOFError, OSError, WhetError):
            self._started.wait()
            if self._over.is_set():
                time.sleep(_PATIENCE_FOR_RAY)  # the driver lets Ray end this actor, which is quieter than its exit
            if self._child is not None:
                self._child.signal(signal.SIGKILL)
                self._over.wait(_PATIENCE_FOR_AN_END)
            os._exit(0)

    def _say(self, **words: Any) -> None:
        with suppress(OSError), self._sending:  # a driver that is gone is noticed by `_obey`
            send(self._control, encode(words))


def _unfit(python: str) -> str:
    """Say why this node's processes cannot run in another interpreter than Ray's; empty: they can."""
    try:
        return "; ".join(faults(probe(Path(python)))) if python else ""
    except ConfigError as error:
        return str(error)


def versions() -> dict[str, str]:
    """Give what must be alike on all nodes of a run."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ray": metadata.version("ray"),
        "whet": metadata.version("whet"),
    }
