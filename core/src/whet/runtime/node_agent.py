"""A Ray actor, the keeper, that starts one worker process on a node, forwards its output to the driver, and ends it.

    driver ── Connection ──────── TCP ─────────> worker_process      the same as on the driver's own machine
       └───── RayProcess ── TCP ── Keeper ── child, output, signals ──┘

Workers do not run in the actor. The worker process is a child of the actor, for three reasons: its exit code or signal
is known, its stacks can be read while its interpreter is stuck, and its threads, imports and environment are not those
of Ray. Only builtins cross Ray.
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
"""Environment variables that Ray sets for its own processes. A worker process does not get them."""
_PATIENCE_FOR_OUTPUT = 2.0
_PATIENCE_FOR_AN_END = 5.0
_PATIENCE_FOR_RAY = 2.0


class Keeper:
    """The actor. `keep` returns at once, so that the actor can always answer Ray."""

    def keep(self, order: dict[str, Any]) -> dict[str, Any]:
        """Connect to the driver and start the worker process. Return this node's versions and an `error`, or ""."""
        found = {**versions(), "error": ""}
        if {key: found[key] for key in order["versions"]} != order["versions"]:
            return found  # the driver compares the versions and raises
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
        """Return at once. Where the actor is lost, Ray raises an error with the cause instead."""


class Keeping:
    """One worker process, and the control connection over which the driver sends orders for this process."""

    def __init__(self, control: socket.socket, connection: socket.socket, order: Mapping[str, Any]) -> None:
        self._control, self._connection, self._order = control, connection, order
        self._sending, self._started, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._child: Child | Forked | None = None
        self._held: socket.socket | None = None
        """A bound socket. It keeps the port of the ranks' rendezvous free for them."""

    def begin(self) -> None:
        """Start the worker process from a thread that lives as long as the process, and take orders in another one."""
        watched("whet-keeper", self._live, self._lost, self._over.is_set)
        watched("whet-keeper-orders", self._obey, self._lost)

    def _live(self) -> None:
        watchdog().detached = True  # when an actor ends, Ray kills its children, but no grandchildren
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
        pump.join(_PATIENCE_FOR_OUTPUT)  # the driver gets the last output before the message that the process ended
        self._say(ended=end)

    def _lost(self, words: str) -> None:
        """Kill the process and send the reason to the driver, because a thread that serves the process has ended."""
        self._started.set()
        self._say(ended=words)
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def _start(self) -> tuple[Child | Forked, IO[bytes]]:
        """Start the process and return it with its output. Fork it where the driver names a fork server.

        A fork server exists only where the driver is on this machine.
        """
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
        """Reserve a port for the rendezvous of ranks. Return the port, or the reason why there is none."""
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
        """Carry out the driver's orders. When the driver is gone, end the worker process and this process."""
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
                time.sleep(_PATIENCE_FOR_RAY)  # the driver has Ray end this actor; Ray reports an exit as an error
            if self._child is not None:
                self._child.signal(signal.SIGKILL)
                self._over.wait(_PATIENCE_FOR_AN_END)
            os._exit(0)

    def _say(self, **words: Any) -> None:
        with suppress(OSError), self._sending:  # `_obey` notices when the driver is gone
            send(self._control, encode(words))


def _unfit(python: str) -> str:
    """Return why the worker process cannot run in the interpreter `python` on this node, or "" where it can."""
    try:
        return "; ".join(faults(probe(Path(python)))) if python else ""
    except ConfigError as error:
        return str(error)


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes of a run."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ray": metadata.version("ray"),
        "whet": metadata.version("whet"),
    }
