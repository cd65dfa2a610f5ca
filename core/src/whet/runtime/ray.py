"""Worker processes on the nodes of a Ray cluster.

    RayLauncher ── one placement group for each group of roles ── a `Keeper` in each bundle ── a worker process

Ray places the processes, assigns GPUs to them, and reports why a node was lost. Messages to workers do not pass through
Ray: each worker process has its own connection to the driver, with the same messages as on one machine. A keeper is the
actor that starts a worker process on its node, see `node_agent`.
"""

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from whet.config.sections import DeadlinesSection
from whet.data.spans import Span
from whet.errors import WhetError
from whet.runtime.call import HostProcess
from whet.runtime.channel import receive, send
from whet.runtime.door import Door, Expected
from whet.runtime.forked import ForkServer, ForkServers
from whet.runtime.launcher import Cluster, Host
from whet.runtime.local import LocalLauncher
from whet.runtime.node_agent import OURS, Keeper, versions
from whet.runtime.process import extra_folders, foreign_folders, worker_environment
from whet.runtime.ray_life import Life
from whet.runtime.ray_places import Bundle, Names, Places
from whet.runtime.ray_session import RaySession
from whet.runtime.wire import decode, encode

_LOOPBACK: Final = "127.0.0.1"
_PATIENCE_FOR_A_CAUSE: Final = 2.5
_PATIENCE_FOR_A_STATE: Final = 0.5
_PATIENCE_FOR_A_KILL: Final = 3.0
_PATIENCE_FOR_A_PORT: Final = 10.0
_STEP_SECONDS: Final = 0.2
_SIGNS_OF_A_LOST_NODE: Final = ("never ran", "marked dead")
"""Phrases in Ray's error for an actor whose node was lost before the actor ran; it can be started on another node."""


class RayCluster(Cluster):
    """Makes slices whose workers run in processes on nodes of a Ray cluster, and ends all these processes."""

    def __init__(
        self,
        log_folder: Path,
        deadlines: DeadlinesSection | None = None,
        share: Sequence[Sequence[str]] = (),
        *,
        run: str = "run",
        address: str = "",
        placement: Mapping[str, str] | None = None,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        python: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        grace_seconds: float = 3.0,
    ) -> None:
        """Make a cluster, with the arguments of `Cluster` and these. Ray starts in the background.

        `run` names the run in Ray's lists and dashboard. `address` is `host:port` of the head of a cluster to join, or
        `auto`; where it is empty, Ray starts on this machine and ends with this cluster. `placement` and `resources`
        map a role to the settings of that name in `ClusterSection`.
        """
        start = (deadlines or DeadlinesSection()).start
        launcher = RayLauncher(run, address, placement or {}, resources or {}, environment or {}, start)
        super().__init__(launcher, log_folder, deadlines, share, python=python, grace_seconds=grace_seconds)


class RayLauncher:
    """Starts worker processes through Ray; see `Launcher`."""

    def __init__(
        self,
        run: str,
        address: str,
        placement: Mapping[str, str],
        resources: Mapping[str, Mapping[str, float]],
        environment: Mapping[str, str],
        start_seconds: float,
    ) -> None:
        self.session = RaySession(address)
        self.ray_names = Names(run)
        self.places = Places(self.session, placement, resources, self.ray_names)
        self.environment = dict(environment)
        self.start_seconds = 0.9 * start_seconds  # below the caller's deadline, so that the error names the cause
        self.token = secrets.token_bytes(32)
        self.names = itertools.count(1)
        self._files = LocalLauncher({})
        self._fork_servers = ForkServers(self._variables, least=1)
        self.guests = Expected()
        self._door: Door | None = None
        self._lock = threading.Lock()

    def process(self, host: Host, group: Sequence[Host], log: Path) -> "RayProcess":
        """Return a process that is not started yet. Its place is a bundle in the placement group of its group."""
        return RayProcess(self, host, group, log, self._fork_servers.of(host.name))

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Start fork servers, which import modules while Ray starts. Do nothing where Ray runs on other machines."""
        if self.session.local:
            folders = {"path": [], "add": foreign_folders()}
            self._fork_servers.start(modules, folders, logs, min(patience_seconds, self.start_seconds / 2))

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Return the folders from which a process imports beside those of its own interpreter, where they exist.

        A process of the driver's interpreter gets all folders of the driver that are outside that interpreter. A
        process of another interpreter imports nothing that is installed for the driver's.
        """
        return {"path": [], "add": extra_folders() if host.python else foreign_folders()}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Return the rendezvous of ranks: a new file where all nodes are this machine, else a port of rank 0's node."""
        self.session.wait(self.start_seconds)
        first = processes[0]
        assert isinstance(first, RayProcess)
        return self._files.rendezvous(role, slot, processes) if self.session.local else first.meeting_point()

    def door(self) -> Door:
        """Return the door, which accepts the connections of processes. Open it at the first call.

        It listens on the loopback where Ray is on this machine alone.
        """
        with self._lock:
            if self._door is None:
                here = _LOOPBACK if self.session.local else self.session.address_here()
                self._door = Door(here, self.token, self.guests.take, purpose="worker processes")
            return self._door

    def address(self) -> str:
        """Return the address of the driver, to which processes connect."""
        self.session.wait(self.start_seconds)
        return self.door().address[0]

    def preparations(self) -> list[Span]:
        """Return the spans of what happens before processes start: the start of Ray, and the fork servers' imports."""
        began, there = self.session.began, self.session.there
        return [*([Span("ray", "start", began, there - began)] if there else []), *self._fork_servers.spans()]

    def close(self) -> None:
        """Release all resources, and end Ray where whet started it."""
        if self._door is not None:
            self._door.close()
        if not self.session.ends_ray:  # else Ray's end releases the places, and a lost Ray might not answer
            self.places.close()
        self.session.close()
        self._fork_servers.close()
        self._files.close()

    def _variables(self, threads: int) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in OURS}
        return {**worker_environment(own, threads, ""), **self.environment}


class RayProcess:
    """A worker process on a node, together with the keeper that started it. See `HostProcess`."""

    def __init__(
        self, launcher: RayLauncher, host: Host, group: Sequence[Host], log: Path, server: ForkServer | None = None
    ) -> None:
        self._launcher, self._host, self._group, self._log = launcher, host, group, log
        self._server = server
        self._name = f"{host.name}#{next(launcher.names)}"
        self.pid = 0
        self.node = ""
        """The address from which the keeper connected, which names the machine."""
        self._bundle: Bundle | None = None
        self._keeper: Any = None
        self._control: socket.socket | None = None
        self._sending, self._killed = threading.Lock(), threading.Event()
        self._ready: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        """The questions that the keeper has not answered yet, by their numbers."""

    def start(self) -> socket.socket:
        """Wait for a place, start a keeper there, which starts the process, and return the process's connection."""
        deadline = time.monotonic() + self._launcher.start_seconds
        try:
            connection = self._life.ask(partial(self._start, deadline))
        except BaseException as error:
            self._killed.set()
            self._ready.set_exception(WhetError(str(error)))
            self._leave()
            raise
        self._ready.set_result(None)
        self._life.lost.add_done_callback(lambda _: self._cut())
        return connection

    def wait(self) -> str:
        """Copy the process's output to its log until it ends. Return how it ended, or why its keeper was lost.

        Raises `ClusterGone` where Ray is lost.
        """
        assert self._control is not None
        try:
            while "ended" not in (said := decode(receive(self._control))):
                if "output" in said:
                    self._write(said["output"])
                elif (answer := self._asked.pop(said["number"], None)) is not None:
                    answer.set_result(said["answer"])
            end = str(said["ended"])
        except (EOFError, OSError, WhetError):
            end = ""
        try:
            return end or self._life.ask(self._why_lost)
        finally:
            self._leave()

    def kill(self) -> None:
        """Order the keeper to kill the process. Have Ray kill the keeper where the process has not ended in time."""
        self._killed.set()
        if self._control is not None:
            self._tell("kill")
            late = threading.Timer(_PATIENCE_FOR_A_KILL, self._kill_keeper)
            late.daemon = True
            late.start()

    def state(self) -> str:
        """Return the kernel's letter for the state of the process, or "" where the keeper does not answer in time."""
        return str(self._ask("state", _PATIENCE_FOR_A_STATE) or "")

    def show_stacks(self) -> None:
        """Order the keeper to have the process write its stacks to its log. It works while its interpreter is stuck."""
        self._tell("stacks")
        self._ask("state", _PATIENCE_FOR_A_STATE)  # the answer comes after all output up to now

    def meeting_point(self) -> str:
        """Wait until the process runs, and return a URL with a reserved port of its node."""
        self._ready.result(self._launcher.start_seconds)
        host, port = self.node, self._ask("port", _PATIENCE_FOR_A_PORT)
        if not isinstance(port, int):
            raise WhetError(f"{self._host.name}: its node {self._where} found no port where its ranks can meet: {port}")
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _start(self, deadline: float) -> socket.socket:
        self._launcher.session.wait(self._left(deadline))
        self._bundle = self._launcher.places.bundle(self._host, self._group, deadline, self._killed)
        door = self._launcher.door()
        control, connection = (self._launcher.guests.expect(f"{self._name}/{end}") for end in ("control", "host"))
        while True:
            called = self._launcher.ray_names
            self._keeper = self._bundle.start(Keeper, called.of_process(self._host), called.namespace)
            try:
                found = self._answer_of(self._keeper.keep.remote(self._order(door.address)), deadline)
                break
            except _NeverRan:  # its node was just lost, and Ray has not moved the bundle to another node yet
                time.sleep(_STEP_SECONDS)
        _same_versions(found, self._where)
        if found["error"]:
            raise WhetError(f"on node {self._where}: {found['error']}")
        with self._sending:
            self._control = control.result(self._left(deadline))
        self.node = str(self._control.getpeername()[0])
        if self._killed.is_set():
            self.kill()
        said = decode(receive(self._control))
        if "started" not in said:
            raise WhetError(f"on node {self._where}: {said.get('ended')}")
        self.pid = said["started"]
        return connection.result(self._left(deadline))

    def _order(self, address: tuple[str, int]) -> dict[str, Any]:
        return {
            "address": list(address),
            "token": self._launcher.token,
            "name": self._name,
            "process": self._host.name,
            "versions": versions(),
            "threads": self._host.threads,
            "gpu": bool(self._host.gpus),
            "one_machine": self._launcher.session.local,
            "python": self._host.python,
            "environment": self._launcher.environment,
            "fork_server": self._server.name if self._server else "",
            "patience_seconds": self._server.patience_seconds if self._server else 0.0,
        }

    def _answer_of(self, reference: Any, deadline: float) -> dict[str, Any]:
        """Wait for the keeper's answer and return it. Raises `WhetError` with Ray's reason where none comes."""
        import ray

        assert self._bundle is not None
        placed = time.monotonic()
        while True:
            try:
                answer: dict[str, Any] = ray.get(reference, timeout=_STEP_SECONDS)
                return answer
            except ray.exceptions.GetTimeoutError:
                if self._killed.is_set():
                    raise WhetError("its process was closed while it started") from None
                if time.monotonic() > deadline:
                    raise WhetError(
                        f"node {self._where} did not start it within {self._launcher.start_seconds:.0f} s; Ray's logs "
                        "there (raylet.err) may say why"
                    ) from None
                if self._launcher.places.placed(self._bundle):
                    placed = time.monotonic()
                else:  # its node was lost, and Ray noticed that only after it had placed the bundle
                    self._launcher.places.refuse_hopeless([self._bundle], placed, deadline)
            except ray.exceptions.RayError as error:
                lost = any(sign in str(error) for sign in _SIGNS_OF_A_LOST_NODE)
                if lost and time.monotonic() < deadline:
                    raise _NeverRan from error
                raise WhetError(
                    f"node {self._where} cannot run it: {_ray_cause(error)}; wanted there: {_listed(versions())}"
                ) from error

    def _why_lost(self) -> str:
        """Ask Ray about the keeper, and return why it or its node was lost."""
        import ray

        if (keeper := self._keeper) is None:
            return (
                f"its keeper on node {self._where} did not end it within {_PATIENCE_FOR_A_KILL:g} s, and was ended too"
            )
        try:
            ray.get(keeper.ping.remote(), timeout=_PATIENCE_FOR_A_CAUSE)
        except ray.exceptions.ActorUnavailableError:
            return f"its node {self._where} was lost: it does not answer Ray any more"
        except ray.exceptions.GetTimeoutError:
            return f"its node {self._where} was lost: it gives Ray no answer within {_PATIENCE_FOR_A_CAUSE:g} s"
        except ray.exceptions.RayError as error:
            return f"its keeper on node {self._where} was lost: {_ray_cause(error)}"
        return f"the connection to its node {self._where} was lost"

    def _leave(self) -> None:
        """Kill the keeper, close its connection, and expect no connection of this process any more."""
        for end in ("control", "host"):
            self._launcher.guests.forget(f"{self._name}/{end}")
        self._kill_keeper()
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _cut(self) -> None:
        """Cut the connection to a keeper that may outlive Ray. The keeper then ends its process, and `wait` returns."""
        if (control := self._control) is not None:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _kill_keeper(self) -> None:
        import ray

        keeper, self._keeper = self._keeper, None
        if keeper is not None and ray.is_initialized():
            with suppress(Exception):  # Ray may be ending, and the keeper ends with it
                self._life.ask(partial(ray.kill, keeper), _PATIENCE_FOR_A_KILL)

    def _ask(self, what: str, seconds: float) -> Any:
        """Ask the keeper a question and return its answer to this question, or None where none comes in time."""
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        try:
            return answer.result(seconds) if self._tell(what, number) else None
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)

    def _tell(self, what: str, number: int = 0) -> bool:
        """Send the keeper an order. Return whether it could be sent."""
        with self._sending, suppress(OSError):
            if self._control is not None:
                send(self._control, encode({"do": what, "number": number}))
                return True
        return False

    def _write(self, words: bytes) -> None:
        with suppress(OSError), self._log.open("ab", buffering=0) as log:  # a full disk must not end the process
            log.write(words)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - time.monotonic())

    @property
    def _life(self) -> Life:
        return self._launcher.session.life

    @property
    def _where(self) -> str:
        """The node's name from Ray. Where Ray has forgotten it: the address from which the keeper connected."""
        try:
            found = "?" if self._bundle is None else self._life.ask(self._bundle.node, _PATIENCE_FOR_A_CAUSE)
        except WhetError:
            found = "?"
        return self.node or found if found == "?" else found


class _NeverRan(WhetError):  # noqa: N818 - the name is what happened
    """An actor was cancelled before it ran, or its node was lost while it started."""


def _same_versions(found: Mapping[str, Any], where: str) -> None:
    wanted = versions()
    there = {name: str(found[name]) for name in wanted}
    if there != wanted:
        raise WhetError(f"node {where} has {_listed(there)}, and the driver {_listed(wanted)}; make them equal")


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _ray_cause(error: BaseException) -> str:
    """Return the sentence with the cause from Ray's long error message."""
    text = str(error)
    _, found, cause = text.partition("The actor is dead because ")
    if found:
        sentence = cause.partition(" Some common causes include")[0].partition(" This can happen when")[0]
        return sentence.strip().rstrip(".")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
