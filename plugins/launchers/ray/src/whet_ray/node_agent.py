"""The node agent: a Ray actor that starts one worker process on a node, carries its messages and output, and ends it.

    driver ── RayLine, RayProcess ── Ray ── NodeAgent ── socket pair, output, signals ──> worker_process

Workers do not run in the actor. The worker process is a child of the actor, for three reasons. Its exit code or signal
is known. Its stacks can be read while its interpreter is stuck. Its threads, imports and environment differ from Ray's.
Only builtins and arrays of bytes cross Ray.
"""

import fcntl
import ipaddress
import os
import platform
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from whet.errors import ConfigError, WhetError
from whet.runtime.interpreters import faults, probe
from whet.runtime.process import Child, on_loopback, worker_environment
from whet.runtime.threads import watched
from whet.runtime.watchdog import leave_signals_to_driver, watchdog
from whet_ray.shared_gpus import assigned_gpus
from whet_weights.ports import reserve
from whet_weights.shared_pages import NODE

OURS: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONBREAKPOINT", "SPT_NOENV")
"""Environment variables for the processes of Ray. A worker process does not get them."""
THREADS: Final = 8
"""Threads of the actor for `start`, `exchange` and `send`. Fewer exchanges than this wait at one time."""
CONTROL_THREADS: Final = 4
"""Threads of the group `control`: one for `drain`, the others for calls that must not wait behind messages."""
NUMBER: Final = struct.Struct("<Q")
"""The number of a message or an answer, before its bytes."""
LARGE: Final = 1 << 16
"""A message or an answer with at least this many bytes goes through the object store."""
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR: the IPv4 address of a network interface; see netdevice(7)."""
_PATIENCE_FOR_OUTPUT: Final = 2.0
_PAUSE_FOR_OUTPUT: Final = 0.01
"""Least time between two pieces of output, so that a process that prints much does not keep Ray busy."""
_CHUNK: Final = 1 << 18
_MOST_HELD: Final = 16 << 20
"""Limit of the bytes from the process that wait for the driver. Above the limit, the process must wait."""


Found = bytes | tuple[int, list[tuple[str, Any]]]
"""An answer: a packed number and then the bytes that the process sent, or `(number, [(kind, bytes or text), ...])`."""


class NodeAgent:
    """The actor. It is threaded: `exchange`, `send` and `drain` may run in any order.

    Therefore messages and answers have numbers. The driver calls `drain` and all methods after `drain` in the
    concurrency group `control`.
    """

    def __init__(self) -> None:
        self._child: Child | None = None
        self._held_port: socket.socket | None = None
        """A bound socket. It keeps the port of the ranks' rendezvous free for them."""
        self._sending, self._early, self._next = threading.Lock(), dict[int, Any](), 0
        """Messages that wait for a message with a lower number, and the number of the message to send next."""
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._found: list[tuple[str, Any]] = []
        """What the driver has not received yet, in order: a kind, and its bytes or text."""
        self._size, self._answers = 0, 0
        self._waiting: list[threading.Lock] = []
        """A lock for each call that waits for something to return. The call of the last lock is served first."""
        leave_signals_to_driver()
        threading.Thread(target=self._end_with_raylet, name="whet-raylet", daemon=True).start()

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the worker process. Return this node's versions and address, the process id, and an `error` or ""."""
        found = {**versions(), "error": "", "pid": 0, "address": _address(order["one_machine"])}
        if {key: found[key] for key in order["versions"]} != order["versions"]:
            return found  # the driver compares the versions and raises
        if words := _unfit(order["python"]):
            return {**found, "error": words}
        started: Future[Child] = Future()
        watched("whet-node-agent", lambda: self._live(order, started), self._lost, lambda: True)
        try:
            self._child = started.result()
        except OSError as error:
            return {**found, "error": f"its process could not be started: {error}"}
        return {**found, "pid": self._child.pid}

    def exchange(self, message: bytes, pieces: Sequence[Any] = ()) -> Found:
        """Do `send`, then the same as `drain`. The reply to a message returns through the call that sent it."""
        self.send(message, pieces)
        return self._next_found(urgent=True)

    def send(self, message: bytes, pieces: Sequence[Any] = ()) -> None:
        """Send a message to the process, after all messages with lower numbers.

        `message` begins with the number. `pieces` are arrays of bytes that follow.
        """
        assert self._child is not None
        with self._sending:
            self._early[NUMBER.unpack_from(message)[0]] = [memoryview(message)[NUMBER.size :], *pieces]
            while self._next in self._early:
                with suppress(OSError):  # the process is gone, which `_read` notices
                    for piece in self._early.pop(self._next):
                        self._child.socket.sendall(piece)
                self._next += 1

    def drain(self) -> Found:
        """Wait until the process has sent or printed something, or has ended. Return all of this with a number."""
        return self._next_found(urgent=False)

    def kill(self) -> None:
        """Kill the worker process."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def state(self) -> str:
        """Return the kernel's letter for the state of the worker process."""
        return "" if self._child is None else self._child.state()

    def show_stacks(self) -> None:
        """Signal the worker process to write its stacks to its output."""
        if self._child is not None:
            self._child.show_stacks()

    def port(self, address: str) -> int | str:
        """Reserve a port for the rendezvous of ranks. Return the port, or the reason why there is none."""
        try:
            self._held_port = reserve(address)
        except WhetError as error:
            return str(error)
        port: int = self._held_port.getsockname()[1]
        return port

    def ping(self) -> None:
        """Return at once. If the actor is lost, Ray raises an error with the cause instead."""

    def leave(self) -> None:
        """End the worker process and this process. Usually Ray does this, but the driver has lost Ray."""
        self.kill()
        os._exit(0)

    def _end_with_raylet(self) -> None:
        """Wait until the raylet of this node has ended, then end too.

        Ray does the same, but only after the raylet's parent has reaped the raylet. In a container whose first process
        reaps nothing, that never happens.
        """
        waiting = select.poll()
        try:
            waiting.register(os.pidfd_open(int(os.environ["RAY_RAYLET_PID"])), select.POLLIN)
            waiting.poll()
        except ProcessLookupError:  # the raylet has ended
            pass
        except (AttributeError, OSError):  # the system is not Linux
            return
        self.leave()

    def _next_found(self, *, urgent: bool) -> Found:
        """Wait until there is something to return, and return all of it with a number. Urgent calls come first."""
        while True:
            with self._lock:
                if self._found:
                    found, self._found, self._size = self._found, [], 0
                    number, self._answers = self._answers, self._answers + 1
                    self._drained.notify()
                    small = len(found) == 1 and isinstance(found[0][1], bytes) and found[0][0] == "sent"
                    return NUMBER.pack(number) + found[0][1] if small else (number, found)
                turn = threading.Lock()
                turn.acquire()
                self._waiting.insert(len(self._waiting) if urgent else 0, turn)
            turn.acquire()

    def _put(self, kind: str, value: Any) -> None:
        with self._lock:
            self._found.append((kind, value))
            self._size += len(value)
            if self._waiting:
                self._waiting.pop().release()

    def _live(self, order: Mapping[str, Any], started: "Future[Child]") -> None:
        """Start the process and wait for its end. The kernel ties the process to this thread."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the process takes the mask over
        watchdog().detached = True  # when an actor ends, Ray kills its children, but not its grandchildren
        try:
            reading, writing = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
            with writing:
                child = Child(
                    "whet.runtime.worker_process", order["process"], environment=_environment(order),
                    stdout=writing, stderr=writing, python=order["python"],
                )  # fmt: skip
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(child)
        pump = watched("whet-output", lambda: self._pass_on(reading), self._lost, lambda: True)
        reader = watched("whet-reader", lambda: self._read(child.socket), self._lost, lambda: True)
        end = child.end()
        for thread in (pump, reader):  # the driver gets the last output and messages before the end
            thread.join(_PATIENCE_FOR_OUTPUT)
        self._put("ended", end)

    def _lost(self, words: str) -> None:
        """Kill the process and send the reason to the driver, because a thread that serves the process has ended."""
        self._put("ended", words)
        self.kill()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Pass the process's output on to the driver, and to the log that Ray keeps of this actor."""
        while words := os.read(output.fileno(), LARGE):
            self._put("output", words)
            with suppress(OSError):
                os.write(1, words)
            time.sleep(_PAUSE_FOR_OUTPUT)

    def _read(self, connection: socket.socket) -> None:
        """Receive bytes from the process until its end. This method does not split the bytes into messages."""
        room = np.empty(_CHUNK, np.uint8)
        while True:
            with self._lock:
                self._drained.wait_for(lambda: self._size < _MOST_HELD)
            try:
                size = connection.recv_into(room.data)
            except OSError:
                size = 0
            if not size:
                self._put("closed", "its process closed the connection to the driver")
                return
            if size < LARGE:
                self._put("sent", room[:size].tobytes())
            else:
                self._put("sent", room[:size])
                room = np.empty(_CHUNK, np.uint8)


def _environment(order: Mapping[str, Any]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in OURS}
    if order["one_machine"]:
        own = on_loopback(own)
    elif interface := interface_of(_address(one_machine=False)):  # by default gloo listens where the host's name leads
        own = {"GLOO_SOCKET_IFNAME": interface, **own}
    gpus = assigned_gpus() if order["gpus"] is None else order["gpus"]
    node = {} if order["one_machine"] else {NODE: import_module("ray").get_runtime_context().get_node_id()}
    return {**worker_environment(own, order["threads"], gpus), **order["environment"], **node}


def _address(one_machine: bool) -> str:
    """Return the address at which the other nodes of the run reach this one."""
    ray: Any = import_module("ray")
    return "127.0.0.1" if one_machine else str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address. Empty: none has it, or it is not known."""
    if ":" in address:
        wanted, table = ipaddress.ip_address(address).packed.hex(), Path("/proc/net/if_inet6")
        rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((row[5] for row in rows if row[0] == wanted), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def _unfit(python: str) -> str:
    """Return why the worker process cannot run in the interpreter `python` on this node, or "" if it can."""
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
