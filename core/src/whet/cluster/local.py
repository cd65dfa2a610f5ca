"""Worker processes on this machine, without Ray.

    LocalCluster ── slice(role) ──> LocalSlice ── spawn(target) ──> LocalWorkers
         │                                                              │ call, scatter, stream
         └── one `Connection` for each process, which roles that share it have in common <──┘

Numbered messages go to `whet.cluster.host` over a socket pair; an answer whose call is over is dropped. Whatever
ends a call (an exception, a death, a deadline) ends it at once for all ranks, with a `WorkerError`.
"""

import asyncio
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from whet.cluster.connection import Call, Clock, Connection
from whet.cluster.process import import_folders
from whet.cluster.slices import WorkerRank
from whet.cluster.watchdog import watchdog
from whet.cluster.wire import encode
from whet.config.sections import DeadlinesSection
from whet.errors import ConfigError, WorkerError

_PATIENCE_FOR_A_DEATH = 1.0
_BUSY_GRACE_SECONDS = 0.3  # who closes in the middle of a call does not want to wait for it


class LocalCluster:
    """Makes slices whose workers are processes of this machine, and ends them all."""

    def __init__(
        self,
        log_folder: Path,
        deadlines: DeadlinesSection | None = None,
        share: Sequence[Sequence[str]] = (),
        *,
        environment: Mapping[str, str] | None = None,
        grace_seconds: float = 3.0,
    ) -> None:
        """Make a cluster.

        Workers write to `log_folder/ROLE-RANK.log`. `share` lists groups of roles that live in the same processes.
        `environment` is added to the workers' environment. They wait for work passively (OMP_WAIT_POLICY=PASSIVE)
        unless it, or the driver's own environment, says otherwise: spinning threads are a little faster on a quiet
        machine and many times slower on a shared one. `grace_seconds` is how long `close` waits before it kills.
        """
        self._logs, self._share = Path(log_folder), [tuple(roles) for roles in share]
        self._deadlines = deadlines or DeadlinesSection()
        self._environment = dict(environment or {})
        self.grace_seconds = grace_seconds
        self.clock = Clock()
        self.numbers = itertools.count(1)
        self._slices: dict[str, LocalSlice] = {}
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()
        self._scratch: Path | None = None
        self._closed = False

    def slice(self, role: str, size: int = 1, threads: int = 1, device: str | Sequence[str] = "cpu") -> "LocalSlice":
        """Give a role its share: ranks, compute threads for each, and a device for all or a list of one for each."""
        devices = (device,) * size if isinstance(device, str) else tuple(device)
        if size < 1 or len(devices) != size:
            raise ConfigError(f"the slice of {role} has {size} ranks and {len(devices)} devices; give each rank one")
        made = LocalSlice(self, role, size, threads, devices, tuple(self._process_name(role, r) for r in range(size)))
        self._slices[role] = made
        for rank in range(size):
            self._gpus(made.host_groups[rank])
        return made

    def warm(self, slices: "Iterable[LocalSlice]", modules: Sequence[str] = ()) -> None:
        """Start the processes of slices and let them import modules, without waiting for it.

        Make all slices first: what a process gets depends on all the roles that share it.
        """
        for part in slices:
            for name in part.host_groups:
                self.connection(name).tell({"do": "import", "modules": list(modules)})

    def connection(self, name: str) -> Connection:
        """Give the process of that name, started if there is none alive."""
        with self._lock:
            if self._closed:
                raise WorkerError(name, None, "start", "the cluster is closed")
            found = self._connections.get(name)
            if found is None or found.dead:
                found = Connection(name, self._log_file(name), self._environment_of(name), self.clock)
                found.tell({"path": import_folders()})
                self._connections[name] = found
            return found

    def deadline(self, phase: str) -> float:
        """Give the seconds that a phase may take: as configured, or the longest where it is not one of those."""
        seconds: dict[str, float] = attrs.asdict(self._deadlines)
        return seconds.get(phase, max(seconds.values()))

    def rendezvous(self, role: str, slot: int) -> str:
        """Give a fresh URL at which the ranks of one spawn meet."""
        with self._lock:
            if self._scratch is None:
                self._scratch = Path(tempfile.mkdtemp(prefix="whet-"))
                watchdog().guard("folder", str(self._scratch))
            return f"file://{self._scratch}/{role}-{slot}"

    def close(self) -> None:
        """End every process, with everything that it started. Safe to call twice."""
        with self._lock:
            self._closed = True
            connections, self._connections = list(self._connections.values()), {}
        grace = _BUSY_GRACE_SECONDS if any(c.busy() for c in connections) else self.grace_seconds
        deadline = time.monotonic() + grace
        for connection in connections:
            connection.leave()
        for connection in connections:
            connection.end(deadline)
        self.clock.stop()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            watchdog().release("folder", str(self._scratch))
            self._scratch = None

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _process_name(self, role: str, rank: int) -> str:
        return f"{self._sharing(role)[0]}-{rank}"

    def _sharing(self, role: str) -> tuple[str, ...]:
        return next((roles for roles in self._share if role in roles), (role,))

    def _inhabitants(self, name: str) -> "list[tuple[LocalSlice, int]]":
        return [(part, part.host_groups.index(name)) for part in self._slices.values() if name in part.host_groups]

    def _gpus(self, name: str) -> list[str]:
        """Give the GPUs of a process: none, or the one that all its roles use."""
        devices = {part.role: part.devices[rank] for part, rank in self._inhabitants(name)}
        gpus = sorted({device.partition(":")[2] or "0" for device in devices.values() if device != "cpu"})
        if len(gpus) > 1:
            listed = ", ".join(f"{role} {device}" for role, device in devices.items())
            raise ConfigError(f"roles that share a process must share its GPU, found {listed}; change cluster.share")
        return gpus

    def _environment_of(self, name: str) -> dict[str, str]:
        threads = str(max((part.threads for part, _ in self._inhabitants(name)), default=1))
        gpus = self._gpus(name)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if gpus and visible != [""]:
            index = int(gpus[0])
            if index >= len(visible):
                raise ConfigError(f"{name} wants GPU {index} of those in CUDA_VISIBLE_DEVICES={','.join(visible)}")
            gpus = [visible[index]]
        return {
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            **self._environment,
        }

    def _log_file(self, name: str) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}.log"
        role, _, rank = name.rpartition("-")
        for other in self._sharing(role)[1:]:
            link = self._logs / f"{other}-{rank}.log"
            if not link.is_symlink() and not link.exists():
                link.symlink_to(log.name)
        return log


@attrs.frozen(eq=False)
class LocalSlice:
    """A role's share of this machine."""

    cluster: LocalCluster
    role: str
    size: int
    threads: int
    devices: tuple[str, ...]
    host_groups: tuple[str, ...]

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> "LocalWorkers":
        """Build one worker object for each rank, all at once, and wait for them under the deadline `start`."""
        slot = next(self.cluster.numbers)
        rendezvous = self.cluster.rendezvous(self.role, slot) if self.size > 1 else ""
        encode(dict(arguments))  # what cannot cross is refused before any process starts
        workers = LocalWorkers(self, slot, [self.cluster.connection(name) for name in self.host_groups])
        building = {"do": "build", "slot": slot, "target": target, "arguments": dict(arguments)}
        places = [
            WorkerRank(self.role, rank, self.size, rendezvous, self.threads, "cpu" if device == "cpu" else "cuda:0")
            for rank, device in enumerate(self.devices)
        ]
        try:
            workers.ask([{**building, "rank": place} for place in places], "start", None).result()
        except BaseException:
            workers.close()
            raise
        return workers


class Gathering:
    """A call under way on several ranks: done when all have answered or one has failed."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._future: Future[list[Any]] = Future()
        self._death: Future[WorkerError | None] = Future()
        """Of a rank that did not raise but was lost; None: all ranks have answered, and none was."""

    def finish(self, rank: int, result: Any, error: WorkerError | None) -> None:
        """Take a rank's answer; what comes after a failure is dropped, but for a death."""
        with self._lock:
            self._results[rank] = result
            self._missing -= 1
            if not self._death.done():
                if error is not None and not error.details:
                    self._death.set_result(error)
                elif not self._missing:
                    self._death.set_result(None)
            if self._future.done():
                return
            if error is not None:
                self._future.set_exception(error)
            elif not self._missing:
                self._future.set_result(self._results)

    def result(self) -> list[Any]:
        """Wait for the results, in rank order; raises `WorkerError`.

        Where a rank dies, those that talk to it raise, often before its death is known here: it is the one to blame.
        """
        try:
            return self._future.result()
        except WorkerError as raised:
            death = None
            if raised.details:
                with suppress(TimeoutError):
                    death = self._death.result(_PATIENCE_FOR_A_DEATH)
            if death is None:
                raise
            raise death from raised

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()


class LocalWorkers:
    """The worker objects of one spawn."""

    def __init__(self, part: LocalSlice, slot: int, connections: Sequence[Connection]) -> None:
        self.role, self.size = part.role, part.size
        self._cluster, self._slot, self._connections = part.cluster, slot, list(connections)
        self._closed = False
        for connection in self._connections:
            connection.enter(slot)

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call on every rank with the same arguments and wait."""
        return self.start(method, *args, phase=phase, timeout_seconds=timeout_seconds).result()

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> Gathering:
        """Start a call on every rank. Leave the arguments' arrays as they are until it is done."""
        message = {"do": "call", "slot": self._slot, "method": method, "args": args}
        return self.ask([message] * self.size, phase or method, timeout_seconds)

    def scatter(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Call rank i with arguments[i] and wait."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        messages = [{"do": "call", "slot": self._slot, "method": method, "args": tuple(args)} for args in arguments]
        return self.ask(messages, phase or method, timeout_seconds).result()

    async def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Iterate an async-generator method of one rank."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]]()

        def deliver(kind: str, value: Any) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, (kind, value))
            except RuntimeError:  # the loop was closed, and nobody waits any more
                connection.drop(number)

        def finish(result: Any, error: WorkerError | None) -> None:
            deliver("end" if error is None else "failed", error)

        connection, number, phase = self._connections[rank], next(self._cluster.numbers), phase or method
        message = {"do": "stream", "number": number, "slot": self._slot, "method": method, "args": args}
        buffers = encode(message)
        connection.ask(number, buffers, self._new_call(rank, phase, None, finish, partial(deliver, "part")))
        ended = False
        try:
            while True:
                kind, value = await arrived.get()
                ended = kind != "part"
                if kind == "failed":
                    raise value
                if ended:
                    return
                yield value
        finally:
            if not ended:
                connection.drop(number)
                connection.tell({"do": "cancel", "number": number})

    def close(self) -> None:
        """Let the workers close, then end their processes where no other role lives in them."""
        if self._closed:
            return
        self._closed = True
        busy = any(connection.busy(self.role) for connection in self._connections)
        grace = _BUSY_GRACE_SECONDS if busy else self._cluster.grace_seconds
        deadline, closing = time.monotonic() + grace, Gathering(self.size)
        for rank, connection in enumerate(self._connections):
            number = next(self._cluster.numbers)
            call = Call(self.role, rank, "close", grace, partial(closing.finish, rank))
            connection.ask(number, encode({"do": "close", "number": number, "slot": self._slot}), call)
        with suppress(WorkerError):  # what a worker raised is in its log
            closing.result()
        ending = [connection for connection in self._connections if connection.exit(self._slot)]
        for connection in ending:
            connection.end(deadline)

    def ask(self, messages: Sequence[dict[str, Any]], phase: str, timeout_seconds: float | None) -> Gathering:
        """Send one message to each rank."""
        if self._closed:
            raise WorkerError(self.role, None, phase, "the workers are closed")
        gathering, number = Gathering(self.size), next(self._cluster.numbers)
        same = all(message is messages[0] for message in messages)
        sent = [encode({"number": number, **message}) for message in (messages[:1] if same else messages)]
        for rank, connection in enumerate(self._connections):
            call = self._new_call(rank, phase, timeout_seconds, partial(gathering.finish, rank))
            connection.ask(number, sent[0 if same else rank], call)
        return gathering

    def _new_call(self, rank: int, phase: str, timeout_seconds: float | None, done: Any, part: Any = None) -> Call:
        seconds = self._cluster.deadline(phase) if timeout_seconds is None else timeout_seconds
        return Call(self.role, rank, phase, seconds, done, part or (lambda item: None), self._missed)

    def _missed(self, error: WorkerError) -> None:
        """End the processes of all ranks: whoever misses a deadline is not trusted again."""
        for connection in self._connections:
            connection.kill(error)
