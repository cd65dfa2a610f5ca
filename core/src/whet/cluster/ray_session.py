"""The connection of a process to Ray: a cluster of its own on this machine, or one that is there.

Ray is started with what would otherwise bite: always `address="local"` or a probed address, a given object store, no
dashboard, no usage statistics, no output of workers in the terminal, and a folder whose name is short enough.
"""

import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from whet.cluster.ports import is_taken, shortage
from whet.cluster.watchdog import watchdog
from whet.errors import ConfigError, WhetError

PROCESS: Final = "whet_process"
"""The resource that processes take of a cluster of our own: what the machine has is shared out by the plan."""
_MANY: Final = 100_000
_OBJECT_STORE_BYTES: Final = 80 << 20  # about the least that Ray takes; no object of ours goes there
_LONGEST_FOLDER: Final = 20  # for a socket, whose path may have 107 characters, Ray adds up to 68, and we add 18
_PROBE_SECONDS: Final = 5.0
_END_SECONDS: Final = 15.0


@frozen
class Node:
    """A living node of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]
    """All that it has, whether in use or not."""

    def __str__(self) -> str:
        shown = {k: v for k, v in self.resources.items() if not k.startswith("node:") and k not in _UNSAID}
        return (
            f"{self.address}: {', '.join(f'{name} {amount:g}' for name, amount in sorted(shown.items())) or 'nothing'}"
        )


_UNSAID = ("memory", "object_store_memory", PROCESS)


class RaySession:
    """Connects in the background, from one thread that stays: Ray's processes end with the thread that started them."""

    def __init__(self, address: str = "") -> None:
        """Begin to connect to `host:port`, or to start Ray on this machine where the address is empty."""
        if util.find_spec("ray") is None:
            raise ConfigError('cluster.launcher: is ray, which is not installed here: pip install "whet[ray]"')
        self.own = not address
        """Whether Ray was started by whet, on this machine. Settled when `wait` returns."""
        self._address = address
        self._folder: Path | None = None
        self._ready: Future[None] = Future()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._live, name="whet-ray", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until Ray is there. Raises `WhetError` saying why it is not."""
        try:
            self._ready.result(seconds)
        except TimeoutError:
            where = f"connect to Ray at {self._address}" if self._address else "start Ray on this machine"
            ask = "; somebody listens there: is it the head of a Ray cluster (cluster.address)?"
            raise WhetError(f"it took more than {seconds:g} s to {where}{ask if self._address else ''}") from None

    @property
    def nodes(self) -> list[Node]:
        """The living nodes."""
        ray: Any = import_module("ray")
        return [
            Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def address_here(self) -> str:
        """Give the address of the node that this process is on, or would be."""
        ray: Any = import_module("ray")
        return str(ray.util.get_node_ip_address())

    def close(self) -> None:
        """Leave Ray, or end it where it is our own."""
        self._leaving.set()
        self._thread.join(_END_SECONDS)

    def _live(self) -> None:
        _set_variables(self.own)
        breakpoints = os.environ.get("PYTHONBREAKPOINT")
        import ray

        if ray.is_initialized():  # by another session, or whoever uses whet as a library; it is theirs to end
            self.own = any(PROCESS in node.resources for node in self.nodes)
            self._ready.set_result(None)
            return
        try:
            self._start() if self.own else self._join()
            _restore("PYTHONBREAKPOINT", breakpoints)  # Ray puts its own debugger there, for its tasks
        except BaseException as error:
            self._ready.set_exception(
                error if isinstance(error, WhetError) else WhetError(f"Ray: {_first(error)}{shortage()}")
            )
        else:
            self._ready.set_result(None)
            self._leaving.wait()
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            watchdog().release("folder", str(self._folder))

    def _start(self) -> None:
        import ray

        port = os.environ.get("RAY_GCS_SERVER_PORT", "")
        if port.isdigit() and int(port) and is_taken(int(port)):  # Ray itself would wait for long, and not say so
            raise WhetError(f"RAY_GCS_SERVER_PORT is {port}, where somebody listens; unset it, or choose another port")
        self._folder = Path(tempfile.mkdtemp(prefix="whet-ray-", dir=_short(tempfile.gettempdir(), "/tmp")))
        watchdog().guard("folder", str(self._folder))
        # No CPUs: Ray starts an idle worker for each.
        ray.init(
            address="local", num_cpus=0, resources={PROCESS: _MANY}, object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(self._folder), **_quiet(),
        )  # fmt: skip

    def _join(self) -> None:
        import ray

        host, _, port = self._address.rpartition(":")
        if not host or not port.isdigit() or "//" in host:
            raise ConfigError(f"cluster.address: is {self._address!r}, wanted `host:port` of the cluster's head")
        try:  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"cluster.address: nobody answers at {self._address} ({error}); is this the address that `ray start "
                "--head` printed, and does it run?"
            ) from error
        ray.init(address=self._address, **_quiet(joining=True))


def _set_variables(own: bool) -> None:
    """Tell Ray what it takes from the environment alone, and reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default workers yield to whatever else there is
    chosen = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
    if own and not chosen and "ray" not in sys.modules:
        # By default it would write a token to the home folder, and say so on every start.
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _quiet(joining: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    return options if joining else {**options, "include_dashboard": False}


def _short(*folders: str) -> str:
    return next((folder for folder in folders if len(folder) <= _LONGEST_FOLDER), folders[-1])


def _first(error: BaseException) -> str:
    lines: Iterable[str] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {next(iter(lines), '')}"
