"""Worker processes on the nodes of a Ray cluster.

    RayLauncher ── one placement group for each group of roles ── a `Keeper` in each bundle ── a host process

Ray places processes, gives them GPUs and tells why a node was lost. What is said to workers does not pass through it:
each process has a connection to the driver of its own, with the same messages as on one machine.
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
"""In what Ray says of an actor that could be started elsewhere."""


class RayCluster(Cluster):
    """Makes slices whose workers are processes on nodes of a Ray cluster, and ends them all."""

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
        """Make a cluster, as `Cluster` says; Ray starts in the background.

        `run` is what Ray's lists call it. `address` is `host:port` of the head of a cluster to join, or `auto`; empty:
        Ray is started on this machine and ends with this cluster. `placement` and `resources` are those of
        `ClusterSection`, by role.
        """
        start = (deadlines or DeadlinesSection()).start
        launcher = RayLauncher(run, address, placement or {}, resources or {}, environment or {}, start)
        super().__init__(launcher, log_folder, deadlines, share, python=python, grace_seconds=grace_seconds)


class RayLauncher:
    """Starts processes through Ray."""

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
        self.start_seconds = 0.9 * start_seconds  # so that who starts a process can say what it waited for
        self.token = secrets.token_bytes(32)
        self.names = itertools.count(1)
        self._files = LocalLauncher({})
        self._fork_servers = ForkServers(self._variables, least=1)
        self.guests = Expected()
        self._door: Door | None = None
        self._lock = threading.Lock()

    def process(self, host: Host, group: Sequence[Host], log: Path) -> "RayProcess":
        """Make a process in a bundle of its group."""
        return RayProcess(self, host, group, log, self._fork_servers.of(host.name))

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Import on this machine while Ray starts here."""
        if self.session.local:
            folders = {"path": [], "add": foreign_folders()}
            self._fork_servers.start(modules, folders, logs, min(patience_seconds, self.start_seconds / 2))

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Let processes import from the folders of this one that are not its interpreter's own, where they see them.

        Those of another interpreter import nothing that is installed in this one.
        """
        return {"path": [], "add": extra_folders() if host.python else foreign_folders()}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Give a fresh file where all nodes are this machine, else a free port of the first process's node."""
        self.session.wait(self.start_seconds)
        first = processes[0]
        assert isinstance(first, RayProcess)
        return self._files.rendezvous(role, slot, processes) if self.session.local else first.meeting_point()

    def door(self) -> Door:
        """Give the door at which processes knock. It opens to this machine alone unless other nodes may join."""
        with self._lock:
            if self._door is None:
                here = _LOOPBACK if self.session.local else self.session.address_here()
                self._door = Door(here, self.token, self.guests.take, purpose="worker processes")
            return self._door

    def address(self) -> str:
        """Give the address at which processes reach this one."""
        self.session.wait(self.start_seconds)
        return self.door().address[0]

    def preparations(self) -> list[Span]:
        """Give the start of Ray, and the imports of fork servers."""
        began, there = self.session.began, self.session.there
        return [*([Span("ray", "start", began, there - began)] if there else []), *self._fork_servers.spans()]

    def close(self) -> None:
        """Give everything back to Ray, and end it where it is our own."""
        if self._door is not None:
            self._door.close()
        if not self.session.ends_ray:  # else they end with Ray, which may have lost whom this would wait for
            self.places.close()
        self.session.close()
        self._fork_servers.close()
        self._files.close()

    def _variables(self, threads: int) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in OURS}
        return {**worker_environment(own, threads, ""), **self.environment}


class RayProcess:
    """A process on some node, and the keeper that stands by it. See `HostProcess`."""

    def __init__(
        self, launcher: RayLauncher, host: Host, group: Sequence[Host], log: Path, server: ForkServer | None = None
    ) -> None:
        self._launcher, self._host, self._group, self._log = launcher, host, group, log
        self._server = server
        self._name = f"{host.name}#{next(launcher.names)}"
        self.pid = 0
        self.node = ""
        """Its machine, named by the address from which its keeper came."""
        self._bundle: Bundle | None = None
        self._keeper: Any = None
        self._control: socket.socket | None = None
        self._sending, self._killed = threading.Lock(), threading.Event()
        self._ready: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        """What the keeper has not answered, by its number."""

    def start(self) -> socket.socket:
        """Find it a place, start a keeper there, and let that start it."""
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
        """Take what it writes until it ends; say how it did, or why its keeper was lost.

        Raises `ClusterGone` where Ray is.
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
        """Let the keeper end it; where that does not answer, Ray ends the keeper."""
        self._killed.set()
        if self._control is not None:
            self._tell("kill")
            late = threading.Timer(_PATIENCE_FOR_A_KILL, self._kill_keeper)
            late.daemon = True
            late.start()

    def state(self) -> str:
        """Ask the keeper for the kernel's letter."""
        return str(self._ask("state", _PATIENCE_FOR_A_STATE) or "")

    def show_stacks(self) -> None:
        """Let the keeper ask for them; its interpreter need not be free for that."""
        self._tell("stacks")
        self._ask("state", _PATIENCE_FOR_A_STATE)  # the answer comes after what was written until now

    def meeting_point(self) -> str:
        """Give a URL with a free port of the process's node, once it runs."""
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
            except _NeverRan:  # its node has just left, and Ray has yet to find the bundle another one
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
        """Wait for the keeper's answer, and say what Ray says where none comes."""
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
                else:  # its node was lost, which Ray knew only after it had been asked for a place
                    self._launcher.places.refuse_hopeless([self._bundle], placed, deadline)
            except ray.exceptions.RayError as error:
                lost = any(sign in str(error) for sign in _SIGNS_OF_A_LOST_NODE)
                if lost and time.monotonic() < deadline:
                    raise _NeverRan from error
                raise WhetError(
                    f"node {self._where} cannot run it: {_ray_cause(error)}; wanted there: {_listed(versions())}"
                ) from error

    def _why_lost(self) -> str:
        """Ask Ray what became of the keeper."""
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
        """Take leave of the keeper."""
        for end in ("control", "host"):
            self._launcher.guests.forget(f"{self._name}/{end}")
        self._kill_keeper()
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _cut(self) -> None:
        """Take leave of a keeper that may live on without Ray: it ends its process, and `wait` is over."""
        if (control := self._control) is not None:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _kill_keeper(self) -> None:
        import ray

        keeper, self._keeper = self._keeper, None
        if keeper is not None and ray.is_initialized():
            with suppress(Exception):  # Ray may be on its way out, and the keeper with it
                self._life.ask(partial(ray.kill, keeper), _PATIENCE_FOR_A_KILL)

    def _ask(self, what: str, seconds: float) -> Any:
        """Give the keeper's answer to this question, not to an earlier one; None where it gives none in time."""
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        try:
            return answer.result(seconds) if self._tell(what, number) else None
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)

    def _tell(self, what: str, number: int = 0) -> bool:
        """Give the keeper an order; say whether it left."""
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
        """Name its node: as Ray does, or by the address from which its keeper came where Ray has forgotten it."""
        try:
            found = "?" if self._bundle is None else self._life.ask(self._bundle.node, _PATIENCE_FOR_A_CAUSE)
        except WhetError:
            found = "?"
        return self.node or found if found == "?" else found


class _NeverRan(WhetError):  # noqa: N818 - it says what happened
    """An actor was cancelled before it began, or its node was lost meanwhile."""


def _same_versions(found: Mapping[str, Any], where: str) -> None:
    wanted = versions()
    there = {name: str(found[name]) for name in wanted}
    if there != wanted:
        raise WhetError(f"node {where} has {_listed(there)}, and the driver {_listed(wanted)}; make them equal")


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _ray_cause(error: BaseException) -> str:
    """Give the sentence of Ray's long text that says what happened."""
    text = str(error)
    _, found, cause = text.partition("The actor is dead because ")
    if found:
        sentence = cause.partition(" Some common causes include")[0].partition(" This can happen when")[0]
        return sentence.strip().rstrip(".")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
