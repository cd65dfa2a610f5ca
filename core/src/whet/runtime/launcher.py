"""A cluster of worker processes: which roles live in which process, and how the processes start and end.

Cluster ── worker_group(role) ──> ProcessWorkerGroup ── spawn(target) ──> ConnectedWorkers
   │                                                              │ call, scatter, stream
   ├── one `Connection` for each process, used by all roles that share the process <──┘
   └── a `Launcher` starts the processes: `whet.runtime.local` on this machine, plugins elsewhere
"""

import itertools
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs import frozen

from whet.component import CORE_VERSION
from whet.config.sections import DeadlinesSection
from whet.errors import ConfigError, WhetError, WorkerError, in_words
from whet.interfaces.workers import WorkerRank
from whet.runtime import WIRE_FORMAT
from whet.runtime.connection import Call, Connection, InFlightCall, end_all
from whet.runtime.deadlines import DeadlineWatch, told_at_once
from whet.runtime.hosts import Host, Launcher
from whet.runtime.traffic import Traffic
from whet.runtime.wire import encode
from whet.runtime.workers import BUSY_GRACE_SECONDS, PATIENCE_FOR_A_DEATH, ConnectedWorkers, RpcSettings

if TYPE_CHECKING:
    from whet.interfaces.weights import Copy

_NO_PHASES = ("heartbeat", "notice")


class Cluster:
    """Makes worker groups whose workers are processes, and ends all the processes."""

    def __init__(
        self, launcher: Launcher, log_folder: Path, deadlines: DeadlinesSection | None = None,
        share: Sequence[Sequence[str]] = (), *, python: Mapping[str, str] | None = None, grace_seconds: float = 3.0,
    ) -> None:  # fmt: skip
        """Make a cluster.

        The output of workers goes to `log_folder/ROLE-RANK.log`. `share` lists groups of roles that live in the same
        processes. `python` has the path of the interpreter of each role that does not run in the driver's interpreter.
        `grace_seconds` is how long `close` waits before it kills the processes.
        """
        self.launcher, self._logs = launcher, Path(log_folder)
        self._share, self._python = [tuple(roles) for roles in share], dict(python or {})
        self._deadlines = deadlines or DeadlinesSection()
        phases = {name: seconds for name, seconds in attrs.asdict(self._deadlines).items() if name not in _NO_PHASES}
        self.settings = RpcSettings(itertools.count(1), phases, grace_seconds)
        self.deadline_watch, self.traffic = DeadlineWatch(self._lose), Traffic(self._lose)
        self._broken = ""
        """Why no process can be used: a thread of the driver was lost. Empty: none was."""
        self._worker_groups: dict[str, ProcessWorkerGroup] = {}
        self._groups: dict[str, list[Host]] = {}
        """Groups of processes, by the role that names them."""
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()
        self._closed = False

    def worker_group(
        self, role: str, size: int = 1, threads: int = 1, device: str | Sequence[str] = "cpu"
    ) -> "ProcessWorkerGroup":
        """Return the share of a role: `size` ranks, with `threads` compute threads each, and their devices.

        `device` is one device for all ranks, or a list with one for each rank. A device is `cpu`, `cuda:2`, or
        `cuda:2,3` for a rank that uses two GPUs.
        """
        devices = (device,) * size if isinstance(device, str) else tuple(device)
        if size < 1 or len(devices) != size:
            raise ConfigError(f"{role} has {size} ranks and {len(devices)} devices; give each rank one")
        names = tuple(f"{self._sharing(role)[0]}-{rank}" for rank in range(size))
        made = ProcessWorkerGroup(self, role, size, threads, devices, names)
        self._worker_groups[role] = made
        self._groups.clear()
        for name in made.host_groups:
            self._host(name)  # roles that share a process must agree on it
        return made

    def warm(self, modules: Mapping[str, Sequence[str]], forkable: Collection[str] = ()) -> None:
        """Start the processes of roles and make them import each role's modules, without waiting.

        Make all groups first: the threads and devices of a process depend on all the roles that share it. A process
        whose roles are all `forkable` may be forked from a server that has imported the modules of all such processes.
        """
        hosts = {name: self._host(name) for role in modules for name in self._worker_groups[role].host_groups}
        wanted = {
            host: [module for role in host.roles for module in modules.get(role, ())]
            for host in hosts.values() if set(host.roles) <= set(forkable) and not host.gpus and not host.python
        }  # fmt: skip
        self._logs.mkdir(parents=True, exist_ok=True)
        self.launcher.fork(wanted, self._logs, self._deadlines.start / 2)
        for role, own in modules.items():
            for name in self._worker_groups[role].host_groups:
                self.connection(name).tell({"do": "import", "modules": list(own)})

    def connection(self, name: str) -> Connection:
        """Return the connection to the process of that name. If no such process is alive, start one."""
        with self._lock:
            if self._closed:
                raise WorkerError(name, None, "start", "the cluster is closed")
            if self._broken:
                raise WorkerError(name, None, "start", self._broken)
            found = self._connections.get(name)
            if found is None or found.dead:
                log = self._log_file(name)
                host = self._host(name)
                process = self.launcher.process(host, self._group(name), log)
                found = Connection(name, log, process, self.deadline_watch.alarm, self.traffic)
                self.deadline_watch.watch(found)
                found.tell({"core": CORE_VERSION, "wire": WIRE_FORMAT, **self.launcher.import_folders(host)})
                if self._deadlines.heartbeat:
                    processes = sum(group.size for group in self._worker_groups.values())
                    found.expect_heartbeats(self._deadlines.heartbeat, processes)
                self._connections[name] = found
            return found

    def loss(self, role: str, phase: str) -> WorkerError | None:
        """Return the loss of a process of a role, for which this waits a moment. None: all are alive.

        When a process dies, those of other roles that use what it shares may fail before its death is known here.
        """
        with self._lock:
            found = [self._connections.get(name) for name in self._worker_groups[role].host_groups]
        deadline = time.monotonic() + PATIENCE_FOR_A_DEATH
        for rank, connection in enumerate(found):
            if connection is not None:
                call = Call(role, rank, phase, math.inf, lambda value, error: None)
                lost = connection.loss(call, max(0.0, deadline - time.monotonic()))
                if lost is not None:
                    return lost
        return None

    def copy_memory(
        self, memory: str, size: int, node: str, have: Collection[str], seconds: float, role: str = "generator"
    ) -> "Mapping[str, Copy]":
        """Copy a memory of a process to the nodes of a role; see `Launcher.copy_memory`."""
        hosts = [self._host(name) for name in self._worker_groups[role].host_groups]
        return self.launcher.copy_memory(memory, size, node, hosts, have, seconds)

    def under_way(self) -> list[InFlightCall]:
        """Return the calls that processes have not answered, the oldest first."""
        with self._lock:
            connections = list(self._connections.values())
        return sorted((u for c in connections for u in c.under_way()), key=lambda u: -u.seconds)

    def stacks(self) -> dict[str, str]:
        """Return, for each process that owes an answer, the end of its log and the stacks of its busy threads."""
        with self._lock:
            connections = [connection for connection in self._connections.values() if connection.busy()]
        words = told_at_once([connection.last_words for connection in connections])
        return {connection.name: found for connection, found in zip(connections, words, strict=True)}

    def close(self) -> None:
        """End every process and all that it started. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections, self._connections = list(self._connections.values()), {}
        busy = any(connection.busy() for connection in connections)
        deadline = time.monotonic() + (BUSY_GRACE_SECONDS if busy else self.settings.grace_seconds)
        for connection in connections:
            connection.leave()
        end_all(connections, deadline)
        self.deadline_watch.stop()
        self.traffic.stop()
        self.launcher.close()

    def _lose(self, words: str) -> None:
        """Fail all current and later calls: without the lost thread they would wait for ever."""
        with self._lock:
            self._broken = self._broken or f"{words}; start the same command again: it resumes"
            connections = list(self._connections.values())
        for connection in connections:
            connection.fail(self._broken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sharing(self, role: str) -> tuple[str, ...]:
        return next((roles for roles in self._share if role in roles), (role,))

    def _host(self, name: str) -> Host:
        first, _, number = name.rpartition("-")
        rank = int(number)  # parsed, because a search among all names is quadratic in the number of processes
        here = [(p, rank) for p in self._worker_groups.values() if self._sharing(p.role)[0] == first and rank < p.size]
        devices = {part.role: part.devices[rank] for part, rank in here}
        gpus = {device.partition(":")[2] or "0" for device in devices.values() if device != "cpu"}
        pythons = {role: self._python.get(role) or "the driver" for role in devices}
        for what, found, each in (("GPU", gpus, devices), ("Python", set(pythons.values()), pythons)):
            if len(found) > 1:
                listed = ", ".join(f"{role} {one}" for role, one in each.items())
                raise ConfigError(
                    f"roles that share a process must share its {what}, found {listed}; change cluster.colocate"
                )
        threads = max((part.threads for part, _ in here), default=1)
        return Host(
            name, tuple(devices), threads, tuple(i for listed in gpus for i in listed.split(",")),
            next((self._python.get(role, "") for role in devices), ""),
        )  # fmt: skip

    def _group(self, name: str) -> list[Host]:
        """Return the processes of the roles of one process, and of all roles that share its GPUs."""
        first = name.rpartition("-")[0]
        if first not in self._groups:  # kept, because a list made for each process is quadratic in their number
            names: dict[str, tuple[str, ...]] = {}
            for part in self._worker_groups.values():
                lead = self._sharing(part.role)[0]
                names[lead] = max(names.get(lead, ()), part.host_groups, key=len)
            hosts = {lead: [self._host(one) for one in found] for lead, found in names.items()}
            gpus = {gpu for host in hosts.get(first, ()) for gpu in host.gpus}
            self._groups[first] = [
                host for lead, found in hosts.items() for host in found
                if lead == first or any(gpus & {*other.gpus} for other in found)
            ]  # fmt: skip
        return self._groups[first]

    def _log_file(self, name: str) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        role, _, rank = name.rpartition("-")
        for other in self._sharing(role)[1:]:
            link = self._logs / f"{other}-{rank}.log"
            if not link.is_symlink() and not link.exists():
                link.symlink_to(log.name)
        return log


@frozen(eq=False)
class ProcessWorkerGroup:
    """A role's share of a cluster: a process for each rank."""

    cluster: Cluster
    role: str
    size: int
    threads: int
    devices: tuple[str, ...]
    host_groups: tuple[str, ...]

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> ConnectedWorkers:
        """Build one worker object for each rank, all at the same time, and return them.

        The deadline is that of the phase `start`.
        """
        encode(dict(arguments))  # raises for arguments that cannot be sent, before any process starts
        slot = next(self.cluster.settings.numbers)
        connect = [partial(self.cluster.connection, name) for name in self.host_groups]
        workers = ConnectedWorkers(self.role, slot, connect, self.cluster.settings)
        building = {"do": "build", "slot": slot, "target": target, "arguments": dict(arguments)}
        try:
            rendezvous = self._rendezvous(slot, workers) if self.size > 1 else ""
            places = [
                WorkerRank(self.role, rank, self.size, rendezvous, self.threads, _within(device))
                for rank, device in enumerate(self.devices)
            ]
            workers.build([{**building, "rank": place} for place in places])
        except BaseException:
            workers.close()
            raise
        return workers

    def _rendezvous(self, slot: int, workers: ConnectedWorkers) -> str:
        try:
            return self.cluster.launcher.rendezvous(self.role, slot, workers.processes)
        except (WhetError, TimeoutError) as error:
            if (lost := self.cluster.loss(self.role, "start")) is not None:
                raise lost from error
            words = f"there is no place where its ranks can meet: {in_words(error)}"
            raise WorkerError(self.role, 0, "start", words) from error


def _within(device: str) -> str:
    """Return a device as a process names it that sees its own GPUs alone: `cuda:2,3` as `cuda:0,1`."""
    return device if device == "cpu" else f"cuda:{','.join(map(str, range(device.count(',') + 1)))}"
