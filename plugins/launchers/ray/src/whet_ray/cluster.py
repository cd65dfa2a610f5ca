"""Worker processes on the nodes of a Ray cluster.

    RayLauncher ── one placement group for each group of roles ── a `NodeAgent` in each bundle ── a worker process

Ray places the processes, assigns GPUs to them, reports why a node was lost, and carries the same messages as on one
machine. A node agent is a Ray actor that starts a worker process on its node, see `node_agent`. The pending call of its
method `drain` is the connection, see `line`. This call fails at once when the agent or its node is lost.
"""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from whet.config.sections import DeadlinesSection
from whet.data.spans import Span
from whet.errors import WhetError
from whet.interfaces.weights import Copy
from whet.runtime.hosts import Host, HostProcess
from whet.runtime.launcher import Cluster
from whet.runtime.local import LocalLauncher
from whet.runtime.process import extra_folders, import_folders
from whet.runtime.traffic import Traffic
from whet_ray.carrier import Carriers
from whet_ray.life import Life
from whet_ray.line import RayLine
from whet_ray.node_agent import versions
from whet_ray.places import Bundle, Names, Places
from whet_ray.session import RaySession
from whet_ray.shared_gpus import SharedGpus

_LOOPBACK: Final = "127.0.0.1"
_PATIENCE_FOR_A_CAUSE: Final = 2.5
_PATIENCE_FOR_A_STATE: Final = 0.5
_PATIENCE_FOR_A_KILL: Final = 3.0
_PATIENCE_FOR_A_PORT: Final = 10.0
_STEP_SECONDS: Final = 0.2
_SIGNS_OF_A_LOST_NODE: Final = ("never ran", "marked dead")
"""Phrases in Ray's error for an actor whose node was lost before the actor ran. The actor can start on another node."""


class RayCluster(Cluster):
    """Makes worker groups whose workers run in processes on nodes of a Ray cluster, and ends all these processes."""

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
        """Make a cluster from the arguments of `Cluster` and the arguments below. Ray starts in the background.

        `run` is the name of the run in Ray's lists and dashboard. `address` is `host:port` of the head of a cluster to
        join, or `auto`. If `address` is empty, Ray starts on this machine and ends with this cluster. `placement` and
        `resources` map a role to the setting with the same name in `ClusterSection`.
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
        self._files = LocalLauncher({})
        self._carriers = Carriers()

    def process(self, host: Host, group: Sequence[Host], log: Path) -> "RayProcess":
        """Return a process that is not started yet. It will run in a bundle of its group's placement group."""
        return RayProcess(self, host, group, log)

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Do nothing: each node agent starts its own process."""

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Return the import folders of a process, where they exist, in addition to the folders of its own interpreter.

        A process of the driver's interpreter gets all import folders of the driver that are outside that interpreter. A
        process of another interpreter imports no package that is installed for the driver's interpreter.
        """
        return {"path": [], "add": extra_folders() if host.python else _foreign_folders()}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Return the rendezvous of ranks: a new file if this machine is the only node, else a port of rank 0's node."""
        self.session.wait(self.start_seconds)
        first = processes[0]
        assert isinstance(first, RayProcess)
        return self._files.rendezvous(role, slot, processes) if self.session.local else first.meeting_point()

    def address(self) -> str:
        """Return the address at which processes reach the driver."""
        self.session.wait(self.start_seconds)
        return _LOOPBACK if self.session.local else self.session.address_here()

    def copy_memory(
        self, memory: str, size: int, node: str, hosts: Sequence[Host], have: Collection[str], seconds: float
    ) -> Mapping[str, Copy]:
        """Copy a memory from its node to every other node of the processes, through Ray's object store."""

        def copy() -> Mapping[str, Copy]:
            others = self.places.nodes(hosts) - {node, *have}
            return self._carriers.copy(memory, size, node, others, seconds) if others else {}

        return self.session.life.ask(copy)

    def preparations(self) -> list[Span]:
        """Return the span in which Ray started. Processes had to wait for this start."""
        began, there = self.session.began, self.session.there
        return [Span("ray", "start", began, there - began)] if there else []

    def close(self) -> None:
        """Release all resources, and end Ray where whet started it."""
        if not self.session.ends_ray:  # otherwise Ray's end releases the places, and a lost Ray might not answer
            self.places.close()
            self._carriers.close()
        self.session.close()
        self._files.close()


class RayProcess:
    """A worker process on a node, together with the node agent that started it. See `HostProcess`."""

    def __init__(self, launcher: RayLauncher, host: Host, group: Sequence[Host], log: Path) -> None:
        self._launcher, self._host, self._group, self._log = launcher, host, group, log
        self.pid = 0
        self.node = ""
        """The address of the process's machine."""
        self._bundle: Bundle | None = None
        self._agent: Any = None
        self._killed = threading.Event()
        self._ready: Future[None] = Future()
        self._reports: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        """Reports in the order of arrival: output of the process, its end, or why its agent was lost."""

    def line(
        self,
        traffic: Traffic,
        take: Callable[[list[memoryview]], Any],
        broken: Callable[[str], None],
        heard: Callable[[], None],
    ) -> RayLine:
        """Return a line that opens with a node agent."""
        return RayLine(traffic, take, broken, heard, lambda kind, value: self._reports.put((kind, value)))

    def start(self) -> Any:
        """Wait for a place, start a node agent there, and return the agent. The agent starts the process."""
        deadline = time.monotonic() + self._launcher.start_seconds
        try:
            self._life.ask(partial(self._start, deadline))
        except BaseException as error:
            self._killed.set()
            self._ready.set_exception(WhetError(str(error)))
            self._kill_agent()
            raise
        self._ready.set_result(None)
        if self._killed.is_set():
            self.kill()
        self._life.lost.add_done_callback(lambda _: self._cut())
        return self._agent

    def wait(self) -> str:
        """Copy the process's output to its log until it ends. Return how it ended, or why its agent was lost.

        Raises `ClusterGone` if Ray is lost.
        """
        try:
            while True:
                kind, value = self._reports.get()
                if kind == "output":
                    self._write(value)
                else:
                    return str(value) if kind == "ended" else self._life.ask(partial(self._why_lost, value))
        finally:
            self._kill_agent()

    def kill(self) -> None:
        """Order the agent to kill the process. If the process does not end in time, order Ray to kill the agent."""
        self._killed.set()
        if self._ready.done():
            self._tell("kill")
            late = threading.Timer(_PATIENCE_FOR_A_KILL, self._kill_agent)
            late.daemon = True
            late.start()

    def state(self) -> str:
        """Return the kernel's letter for the state of the process, or "" if the agent does not answer in time."""
        return str(self._ask("state", _PATIENCE_FOR_A_STATE) or "")

    def show_stacks(self) -> None:
        """Order the agent to make the process write its stacks to its log, even while its interpreter is stuck."""
        self._ask("show_stacks", _PATIENCE_FOR_A_STATE)

    def meeting_point(self) -> str:
        """Wait until the process runs, and return a URL with a reserved port of its node."""
        self._ready.result(self._launcher.start_seconds)
        host, port = self.node, self._ask("port", _PATIENCE_FOR_A_PORT, self.node)
        if port is None:
            raise WhetError(f"{self._host.name}: its node {self._where} gave no answer")
        if not isinstance(port, int):
            raise WhetError(f"{self._host.name}: its node {self._where} found no port where its ranks can meet: {port}")
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def _start(self, deadline: float) -> None:
        self._launcher.session.wait(self._left(deadline))
        self._bundle = self._launcher.places.bundle(self._host, self._group, deadline, self._killed)
        names = self._launcher.ray_names
        while True:
            self._agent = self._bundle.start(names.of_process(self._host), names.namespace)
            try:
                gpus = self._visible_gpus(self._bundle.shared, deadline)
                found = self._answer_of(self._agent.start.remote(self._order(gpus)), deadline)
                break
            except _NeverRan:  # its node was just lost, and Ray has not moved the bundle to another node yet
                time.sleep(_STEP_SECONDS)
        _same_versions(found, self._where)
        if found["error"]:
            raise WhetError(f"on node {self._where}: {found['error']}")
        self.node, self.pid = found["address"], found["pid"]

    def _visible_gpus(self, shared: SharedGpus | None, deadline: float) -> str | None:
        """Return the GPUs that the process is to see. None: those that Ray assigns to its agent."""
        if not self._host.gpus:
            return ""
        return None if shared is None else shared.visible(self._host, self._answer_of(shared.assigned(), deadline))

    def _order(self, gpus: str | None) -> dict[str, Any]:
        return {
            "process": self._host.name,
            "versions": versions(),
            "threads": self._host.threads,
            "gpus": gpus,
            "one_machine": self._launcher.session.local,
            "python": self._host.python,
            "environment": self._launcher.environment,
        }

    def _answer_of(self, reference: Any, deadline: float) -> Any:
        """Wait for the answer of an actor in the bundle and return it.

        Raises `WhetError` with Ray's reason if no answer comes.
        """
        import ray

        assert self._bundle is not None
        placed = time.monotonic()
        while True:
            try:
                return ray.get(reference, timeout=_STEP_SECONDS)
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

    def _why_lost(self, reported: Exception | None) -> str:
        """Ask Ray about the agent, and return why it or its node was lost. `reported`: what its line has reported."""
        import ray

        if (agent := self._agent) is None:
            return (
                f"its node agent on {self._where} did not end it within {_PATIENCE_FOR_A_KILL:g} s, and was ended too"
            )
        try:
            ray.get(_method(agent, "ping").remote(), timeout=_PATIENCE_FOR_A_CAUSE)
        except ray.exceptions.ActorUnavailableError:
            return f"its node {self._where} was lost: it does not answer Ray any more"
        except ray.exceptions.GetTimeoutError:
            return f"its node {self._where} was lost: it gives Ray no answer within {_PATIENCE_FOR_A_CAUSE:g} s"
        except ray.exceptions.RayError as error:
            return f"its node agent on {self._where} was lost: {_ray_cause(error)}"
        words = f": {_ray_cause(reported)}" if reported else ""
        return f"the connection to its node {self._where} was lost{words}"

    def _cut(self) -> None:
        """Order the agent to end its process and itself, because it may outlive Ray. Make `wait` return."""
        self._tell("leave")
        self._reports.put(("lost", None))

    def _kill_agent(self) -> None:
        import ray

        agent, self._agent = self._agent, None
        if agent is not None and ray.is_initialized():
            with suppress(Exception):  # Ray may be ending, and the agent ends with it
                self._life.ask(partial(ray.kill, agent), _PATIENCE_FOR_A_KILL)

    def _ask(self, what: str, seconds: float, *arguments: Any) -> Any:
        """Call a method of the agent and return its answer, or None if no answer comes in time."""
        import ray

        if (agent := self._agent) is None:
            return None
        with suppress(WhetError, ray.exceptions.RayError):
            return self._life.ask(lambda: ray.get(_method(agent, what).remote(*arguments), timeout=seconds), seconds)
        return None

    def _tell(self, what: str) -> None:
        """Call a method of the agent that has no answer."""
        if (agent := self._agent) is not None:
            with suppress(Exception):  # Ray may be ending, and the agent ends with it
                _method(agent, what, num_returns=0).remote()

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
        """Return the node's name from Ray, or the node's address if Ray does not know the name."""
        try:
            found = "?" if self._bundle is None else self._life.ask(self._bundle.node, _PATIENCE_FOR_A_CAUSE)
        except WhetError:
            found = "?"
        return self.node or found if found == "?" else found


def _method(agent: Any, name: str, **options: Any) -> Any:
    """Return a method of an agent. A call of this method does not wait behind messages."""
    return getattr(agent, name).options(concurrency_group="control", **options)


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


def _foreign_folders() -> list[str]:
    """Return the import folders of this process that are outside the folders of its interpreter."""
    own = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    inside = tuple(prefix + os.sep for prefix in own)
    return [folder for folder in import_folders() if not os.path.realpath(folder).startswith(inside)]
