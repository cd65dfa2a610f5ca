"""Worker processes on this machine: children of the driver, each connected by a socket pair."""

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whet.config.sections import DeadlinesSection
from whet.data.spans import Span
from whet.errors import ConfigError
from whet.runtime.channel import Line
from whet.runtime.forked import Forked, ForkServer, NoForkServer, fixed
from whet.runtime.hosts import Host, HostProcess
from whet.runtime.launcher import Cluster
from whet.runtime.process import Child, extra_folders, import_folders, on_loopback, worker_environment
from whet.runtime.traffic import Traffic
from whet.runtime.watchdog import watchdog

logger = logging.getLogger(__name__)

LEAST_FORKED: Final = 2
"""Fewest processes for which a fork server starts. A single process imports as fast without one."""


class LocalCluster(Cluster):
    """Makes worker groups whose workers are processes of this machine, and ends all the processes."""

    def __init__(
        self, log_folder: Path, deadlines: DeadlinesSection | None = None, share: Sequence[Sequence[str]] = (), *,
        python: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None,
        grace_seconds: float = 3.0,
    ) -> None:  # fmt: skip
        """Make a cluster; see `Cluster`. `environment` is added to the variables of the workers."""
        launcher = LocalLauncher(environment or {})
        super().__init__(launcher, log_folder, deadlines, share, python=python, grace_seconds=grace_seconds)


class LocalLauncher:
    """Starts processes as children of this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._servers: dict[str, ForkServer] = {}
        """The fork server of each process that has one, by the name of the process."""
        self._scratch: Path | None = None
        self._lock = threading.Lock()

    def process(self, host: Host, group: Sequence[Host], log: Path) -> "LocalProcess":
        """Return a process that is not started yet. It runs in the driver's interpreter if its roles name no other."""
        visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), host.gpus
        if gpus and visible != [""]:
            if beyond := next((gpu for gpu in gpus if int(gpu) >= len(visible)), ""):
                raise ConfigError(f"{host.name} wants GPU {beyond} of CUDA_VISIBLE_DEVICES={','.join(visible)}")
            gpus = tuple(visible[int(gpu)] for gpu in gpus)
        variables = self._variables(host.threads, ",".join(gpus))
        return LocalProcess(host.name, variables, log, host.python, self._servers.get(host.name))

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Start a fork server wherever several processes have the same number of threads."""
        if not hasattr(os, "pidfd_open"):
            return
        for threads in sorted({host.threads for host in modules}):
            alike = [host for host in modules if host.threads == threads]
            if len(alike) < LEAST_FORKED:
                continue
            wanted = list(dict.fromkeys(module for host in alike for module in modules[host]))
            # Padding, so that the arguments of a forked process, with its longer names, fit into those of the server.
            title = "fork-server".ljust(max(len(host.name) for host in alike) + len("worker_process"))
            folders, log = {"path": import_folders(), "add": []}, logs / f"fork-server-{threads}.log"
            server = ForkServer(title, wanted, folders, self._variables(threads), log, patience_seconds)
            self._servers |= dict.fromkeys((host.name for host in alike), server)

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Return the folders from which a process imports: the same as the driver.

        A process of another interpreter gets only the driver's folders outside its installation.
        """
        return {"path": [], "add": extra_folders()} if host.python else {"path": import_folders(), "add": []}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Return the URL of a new file in a temporary folder."""
        with self._lock:
            if self._scratch is None:
                self._scratch = Path(tempfile.mkdtemp(prefix="whet-"))
                watchdog().guard("folder", str(self._scratch))
            return f"file://{self._scratch}/{role}-{slot}"

    def address(self) -> str:
        """Return the address at which processes reach this machine."""
        return "127.0.0.1"

    def copy_memory(
        self, memory: str, size: int, node: str, hosts: Sequence[Host], have: Collection[str], seconds: float
    ) -> dict[str, Any]:
        """Do nothing: every process is on this machine."""
        return {}

    def preparations(self) -> list[Span]:
        """Return spans for the imports of the fork servers."""
        servers = dict.fromkeys(self._servers.values())
        return [Span("run", "import", s.began, s.imported - s.began) for s in servers if s.imported]

    def close(self) -> None:
        """End the fork servers, and remove temporary files."""
        for server in set(self._servers.values()):
            server.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            watchdog().release("folder", str(self._scratch))
            self._scratch = None

    def _variables(self, threads: int, gpus: str = "") -> dict[str, str]:
        return {**worker_environment(on_loopback(os.environ), threads, gpus), **self._environment}


class LocalProcess:
    """A child of the driver. See `HostProcess`."""

    def __init__(
        self, name: str, environment: Mapping[str, str], log: Path, python: str = "", server: ForkServer | None = None
    ) -> None:
        self._name, self._environment, self._log, self._python = name, environment, log, python
        self._server = server
        self._child: Child | Forked | None = None
        self._killed = False

    @property
    def pid(self) -> int:
        """Return the process id; 0 before the start."""
        return 0 if self._child is None else self._child.pid

    def line(
        self, traffic: Traffic, take: Callable[[list[memoryview]], Any], broken: Callable[[str], None],
        heard: Callable[[], None],
    ) -> Line:  # fmt: skip
        """Return a line that opens with a socket."""
        return Line(traffic, take, broken, heard)

    def start(self) -> socket.socket:
        """Start the process from this thread and return the driver's end of its socket. It ends with the thread."""
        with self._log.open("ab") as log:
            self._child = self._forked(log.fileno()) or Child(
                "whet.runtime.worker_process", self._name, environment=self._environment, stdout=log, stderr=log,
                python=self._python,
            )  # fmt: skip
        if self._killed:
            self.kill()
        return self._child.socket

    def _forked(self, output: int) -> Forked | None:
        """Fork the process, if it has a server that can. Return None otherwise."""
        if self._server is None:
            return None
        try:
            return Forked(
                self._server, self._name, environment=fixed(self._environment), output=output,
                stopped=lambda: self._killed,
            )  # fmt: skip
        except NoForkServer as error:
            logger.info("%s is not forked: %s", self._name, error)
            return None

    def wait(self) -> str:
        """Wait until the process has ended, end all that it started, and return how it ended, in words."""
        assert self._child is not None
        return self._child.end()

    def kill(self) -> None:
        """Kill the process. If it is not started yet, kill it as soon as it is."""
        self._killed = True
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def state(self) -> str:
        """Return the kernel's letter for the state of the process; empty before the start."""
        return "" if self._child is None else self._child.state()

    def show_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log. This works even if its interpreter is busy."""
        if self._child is not None:
            self._child.show_stacks()
