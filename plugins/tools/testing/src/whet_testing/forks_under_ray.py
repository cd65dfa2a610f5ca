"""Fork the worker processes of Ray's node agents from one process that has imported torch already.

    test ── ForkServer            the connection to the fork server is passed on
      └── socket in a folder <── connect ── node agent ── Forked ──> fork server ── fork ──> worker_process

A node agent starts a worker process, which imports torch and transformers. That takes seconds in each process. If a Ray
starts with the variables of `ForksUnderRay`, its node agents fork their processes from one fork server, as the local
launcher does. A process with another interpreter, with GPUs or with more than one thread is started.
"""

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from whet.runtime.forked import Forked, ForkServer, NoForkServer
from whet.runtime.process import Child, Offspring, import_folders, on_loopback, worker_environment

SOCKET = "WHET_FORKS_UNDER_RAY"
"""The environment variable with the path of the socket that leads to the fork server."""
SETUP = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""The environment variable with a function that Ray calls in each process that it starts for an actor."""
_THREADS = 1
_TITLE = "fork-server".ljust(80)  # room for the names of processes
_PATIENCE_SECONDS = 60.0


class ForksUnderRay:
    """A fork server for node agents."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """Start the fork server, which imports `modules`. `folder` is new and has a short path."""
        environment = worker_environment(on_loopback(os.environ), _THREADS, gpus="")
        folders = {"path": import_folders(), "add": []}
        self._server = ForkServer(_TITLE, modules, folders, environment, folder / "fork-server.log", _PATIENCE_SECONDS)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / "forks"))
        self._listening.listen()
        threading.Thread(target=self._pass_on, name="whet-forks-under-ray", daemon=True).start()
        self.variables = {SOCKET: str(folder / "forks"), SETUP: f"{__name__}.set_up"}
        """The environment variables with which a Ray starts whose node agents fork their processes."""

    def close(self) -> None:
        """End the fork server, and the processes that it forked."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._server.close()

    def _pass_on(self) -> None:
        """Send a new connection to the fork server over each connection, until the end."""
        with suppress(OSError):
            while True:
                asked, _ = self._listening.accept()
                with asked, suppress(OSError), self._server.line() as line:
                    socket.send_fds(asked, [b"+"], [line.fileno()])


class _Passed:
    """The fork server, in a process of Ray."""

    patience_seconds = _PATIENCE_SECONDS

    def line(self) -> socket.socket:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(os.environ[SOCKET])
            _, given, _, _ = socket.recv_fds(asked, 1, 1)
        if not given:
            raise ConnectionError("the fork server is gone")
        return socket.socket(fileno=given[0])


def set_up() -> None:
    """Make the node agent of this process, if it becomes one, fork its process."""
    agents: Any = import_module("whet_ray.node_agent")
    agents.Child = _child


def _child(
    module: str, name: str, *, environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes], python: str
) -> Offspring:
    alike = not python and environment["OMP_NUM_THREADS"] == str(_THREADS) and not environment["CUDA_VISIBLE_DEVICES"]
    if alike:
        server: Any = _Passed()
        with suppress(NoForkServer):
            return Forked(server, name, environment=environment, output=stdout.fileno())
    return Child(module, name, environment=environment, stdout=stdout, stderr=stderr, python=python)
