"""Worker processes on this machine, without Ray: children of the driver, each at the end of a socket pair."""

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whet.config.sections import DeadlinesSection
from whet.data.spans import Span
from whet.errors import ConfigError
from whet.runtime.call import HostProcess
from whet.runtime.forked import Forked, ForkServer, ForkServers, NoForkServer, fixed
from whet.runtime.launcher import Cluster, Host
from whet.runtime.process import Child, extra_folders, import_folders, on_loopback, worker_environment
from whet.runtime.watchdog import watchdog

logger = logging.getLogger(__name__)

LEAST_FORKED: Final = 2
"""One process alone imports as fast by itself."""


class LocalCluster(Cluster):
    """Makes slices whose workers are processes of this machine, and ends them all."""

    def __init__(
        self,
        log_folder: Path,
        deadlines: DeadlinesSection | None = None,
        share: Sequence[Sequence[str]] = (),
        *,
        python: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        grace_seconds: float = 3.0,
    ) -> None:
        """Make a cluster, as `Cluster` says. `environment` is added to that of the workers."""
        launcher = LocalLauncher(environment or {})
        super().__init__(launcher, log_folder, deadlines, share, python=python, grace_seconds=grace_seconds)


class LocalLauncher:
    """Starts processes as children of this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._fork_servers = ForkServers(self._variables, LEAST_FORKED)
        self._scratch: Path | None = None
        self._lock = threading.Lock()

    def process(self, host: Host, group: Sequence[Host], log: Path) -> "LocalProcess":
        """Make a process, of the driver's own interpreter where its roles have no other."""
        visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), host.gpus
        if gpus and visible != [""]:
            if beyond := next((gpu for gpu in gpus if int(gpu) >= len(visible)), ""):
                raise ConfigError(
                    f"{host.name} wants GPU {beyond} of those in CUDA_VISIBLE_DEVICES={','.join(visible)}"
                )
            gpus = tuple(visible[int(gpu)] for gpu in gpus)
        server = self._fork_servers.of(host.name)
        return LocalProcess(host.name, self._variables(host.threads, ",".join(gpus)), log, host.python, server)

    def fork(self, modules: Mapping[Host, Sequence[str]], logs: Path, patience_seconds: float) -> None:
        """Import once where several processes want the same number of threads."""
        self._fork_servers.start(modules, {"path": import_folders(), "add": []}, logs, patience_seconds)

    def import_folders(self, host: Host) -> dict[str, Any]:
        """Let processes import what this one does; those of another interpreter only what is not installed in this."""
        return {"path": [], "add": extra_folders()} if host.python else {"path": import_folders(), "add": []}

    def rendezvous(self, role: str, slot: int, processes: Sequence[HostProcess]) -> str:
        """Give a fresh file."""
        with self._lock:
            if self._scratch is None:
                self._scratch = Path(tempfile.mkdtemp(prefix="whet-"))
                watchdog().guard("folder", str(self._scratch))
            return f"file://{self._scratch}/{role}-{slot}"

    def address(self) -> str:
        """Give the address at which processes reach this one."""
        return "127.0.0.1"

    def preparations(self) -> list[Span]:
        """Give the imports of fork servers."""
        return self._fork_servers.spans()

    def close(self) -> None:
        """End fork servers, and remove temporary files."""
        self._fork_servers.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            watchdog().release("folder", str(self._scratch))
            self._scratch = None

    def _variables(self, threads: int, gpus: str = "") -> dict[str, str]:
        return {**worker_environment(on_loopback(os.environ), threads, gpus), **self._environment}


class LocalProcess:
    """A child of the driver. See `HostProcess`."""

    node = ""
    """That of the driver."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        log: Path,
        python: str = "",
        server: ForkServer | None = None,
    ) -> None:
        self._name, self._environment, self._log, self._python = name, environment, log, python
        self._server = server
        self._child: Child | Forked | None = None
        self._killed = False

    @property
    def pid(self) -> int:
        """Of the process; 0 before it is started."""
        return 0 if self._child is None else self._child.pid

    def start(self) -> socket.socket:
        """Start it from this thread, with which it ends."""
        with self._log.open("ab") as log:
            self._child = self._forked(log.fileno()) or Child(
                "whet.runtime.worker_process", self._name, environment=self._environment, stdout=log, stderr=log,
                python=self._python,
            )  # fmt: skip
        if self._killed:
            self.kill()
        return self._child.socket

    def _forked(self, output: int) -> Forked | None:
        """Have it forked, where there is a server for it that can."""
        if self._server is None:
            return None
        try:
            return Forked(
                self._server.name, self._name, environment=fixed(self._environment), output=output,
                patience_seconds=self._server.patience_seconds, stopped=lambda: self._killed,
            )  # fmt: skip
        except NoForkServer as error:
            logger.info("%s is not forked: %s", self._name, error)
            return None

    def wait(self) -> str:
        """Wait for its end, end what it started, and say how it ended."""
        assert self._child is not None
        return self._child.end()

    def kill(self) -> None:
        """End it, or what will be started."""
        self._killed = True
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    def state(self) -> str:
        """Give the kernel's letter for what it does."""
        return "" if self._child is None else self._child.state()

    def show_stacks(self) -> None:
        """Let it write to its log what its threads do; its interpreter need not be free for that."""
        if self._child is not None:
            self._child.show_stacks()
