"""The connection of the driver's process to Ray: to a Ray that whet starts on this machine, or to an existing cluster.

A process has one connection at a time. All sessions of the process share it, and the last session that closes ends it.
A session that opens while the connection ends waits for the end, however long that takes.

whet starts Ray with settings that avoid known problems: always `address="local"` or a probed address, a fixed size of
the object store, no dashboard, no usage statistics, no output of workers in the terminal, and a short folder name. A
Ray on this machine has no autoscaler and no monitor of logs either: they serve nothing here, and Ray would wait for
the start of their processes.
"""

import ctypes
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from whet.errors import ConfigError, WhetError
from whet.runtime.threads import watched
from whet.runtime.watchdog import FAMILY, watchdog
from whet_ray.address import VARIABLE, head_of, source_of
from whet_ray.life import HeadSigns, Life, OwnSigns, connect, own_mark
from whet_ray.token import hide_token, make_token, shown_token
from whet_ray.variables import environment, set_variables
from whet_weights.ports import is_taken, shortage

PROCESS: Final = "whet_process"
"""A resource of a Ray that whet starts. Each process takes one unit. The plan, not Ray, divides the machine's CPUs."""
_MANY: Final = 100_000
_OBJECT_STORE_BYTES: Final = 256 << 20  # for large messages, until they have been received
_LEAST_FILES: Final = 128
_LONGEST_FOLDER: Final = 20  # a socket's path has 107 characters at most; Ray adds up to 68, whet adds 18
_END_SECONDS: Final = 15.0


@frozen
class Node:
    """A live node of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]
    """All resources of the node, in use or not."""

    def __str__(self) -> str:
        shown = {k: v for k, v in self.resources.items() if not k.startswith("node:") and k not in _UNSAID}
        return (
            f"{self.address}: {', '.join(f'{name} {amount:g}' for name, amount in sorted(shown.items())) or 'nothing'}"
        )


_UNSAID = ("memory", "object_store_memory", PROCESS)


class RaySession:
    """One user of this process's connection to Ray. The connection opens in the background."""

    def __init__(self, address: str = "") -> None:
        """Begin to connect to `host:port` or `auto`. If the address is empty, begin to start Ray on this machine."""
        if find_spec("ray") is None:
            raise ConfigError("cluster.launcher: is ray, and the package ray is not installed here: pip install ray")
        hide_token()
        self.began = time.time()
        """When this session began, in seconds since the epoch."""
        self.there = 0.0
        """When Ray was ready, in seconds since the epoch, or 0.0 before that."""
        self._connection = _lease(address)
        self._closed = False
        self._connection.when_there(self._note)

    @property
    def local(self) -> bool:
        """Return whether whet started Ray, on this machine alone. The value is final once `wait` has returned."""
        return self._connection.local

    @property
    def ends_ray(self) -> bool:
        """Return whether Ray ends with this session: whet started Ray, and no other session of this process uses it."""
        return self.local and self._connection.sessions == 1

    @property
    def life(self) -> Life:
        """Return the object that knows whether Ray is lost. Every call that may wait for Ray goes through its `ask`."""
        return self._connection.life

    def wait(self, seconds: float) -> None:
        """Wait until Ray is ready. Raises `WhetError` with the reason if Ray is not ready in time."""
        self._connection.wait(seconds)

    @property
    def nodes(self) -> list[Node]:
        """Return the live nodes of the cluster."""
        ray: Any = import_module("ray")
        return [
            Node(str(node["NodeID"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ]

    def address_here(self) -> str:
        """Return the address that this machine has, or would have, as a node of the cluster."""
        ray: Any = import_module("ray")
        return str(ray.util.get_node_ip_address())

    def _note(self) -> None:
        self.there = time.time()

    def close(self) -> None:
        """Leave the connection. If this was its last session, end the connection. Safe to call twice."""
        if not self._closed:
            self._closed = True
            _give_back(self._connection)


class _Connection:
    """The connection to Ray. One thread holds it to its end, because Ray's processes end with their parent thread."""

    def __init__(self, address: str, before: "_Connection | None") -> None:
        self.address, self.local = address, not address
        self.life = Life()
        self.sessions = 1
        self._before = before
        self._head = ""
        """`host:port` of the head of a cluster that was joined."""
        self._folder: Path | None = None
        self._own: OwnSigns | None = None
        self._ready: Future[None] = Future()
        self._leaving = threading.Event()
        self._thread = watched("whet-ray", self._live, self._lost, lambda: True)

    @property
    def usable(self) -> bool:
        """Return whether another session can share this connection."""
        failed = self._ready.done() and self._ready.exception()
        return self.sessions > 0 and not failed and not self.life.lost.done()

    def when_there(self, note: Callable[[], None]) -> None:
        """Call `note` once Ray is ready, or once it has failed to start."""
        self._ready.add_done_callback(lambda _: note())

    def wait(self, seconds: float) -> None:
        """Wait until Ray is ready. Raises `WhetError` with the reason if Ray is not ready in time."""
        try:
            self._ready.result(seconds)
        except TimeoutError:
            what = f"connect to Ray at {self.address}" if self.address else "start Ray on this machine"
            why = ""
            if self._before is not None:
                why = "; the Ray that this process used before has not ended yet"
            elif self.address:
                why = "; somebody listens there: is it the head of a Ray cluster (cluster.address)?"
            raise WhetError(f"it took more than {seconds:.3g} s to {what}{why}") from None

    def end(self) -> None:
        """Disconnect from Ray. If whet started Ray, and Ray does not end in time, kill it.

        The raylet is killed first. If the `gcs_server` ends while the driver disconnects, the driver can wait for it,
        and after a minute Ray ends the driver's process.
        """
        self._leaving.set()
        self._thread.join(_END_SECONDS)
        for name in ("raylet", "gcs_server"):
            if self._thread.is_alive() and self._own is not None:
                self._own.kill(name)
                self._thread.join(_END_SECONDS)

    def _lost(self, words: str) -> None:
        with suppress(InvalidStateError):
            self._ready.set_exception(WhetError(words))
        self.life.end(words)

    def _live(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        _set_variables(self.local)
        breakpoints = os.environ.get("PYTHONBREAKPOINT")
        there = sys.modules.get("ray")
        if there is not None and there.is_initialized():  # a program that uses whet as a library started Ray
            self.local = False
            self._ready.set_result(None)
            return
        try:
            with shown_token(self._made_folder()), _own_sigterm():
                import_module("ray")  # Ray reads environment variables at its import
                self._start() if self.local else self._join()
            set_variables({"PYTHONBREAKPOINT": breakpoints})  # Ray sets this variable to its own debugger
            self._own = OwnSigns() if self.local else None
        except BaseException as error:
            self._ready.set_exception(error if isinstance(error, WhetError) else _not_started(error))
        else:
            self._ready.set_result(None)
            self.life.watch(self._own or HeadSigns(self._head), self._leaving)
        if self._own is not None and self.life.lost.done():
            self._own.kill("raylet")
        with _own_sigterm():
            import_module("ray").shutdown()
        if self._own is not None:
            self._own.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            watchdog().release("folder", str(self._folder))

    def _start(self) -> None:
        import ray

        _refuse_what_ray_would_wait_for()
        # No CPUs, because Ray starts an idle worker for each CPU.
        with environment(_while_ray_starts()), _on_loopback(), _without_monitors(), _without_sigterm():
            ray.init(
                address="local", num_cpus=0, resources={PROCESS: _MANY}, object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._made_folder()), **_quiet(),
            )  # fmt: skip

    def _made_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="whet-ray-", dir=_short(tempfile.gettempdir(), "/tmp")))
            watchdog().guard("folder", str(self._folder))
        return self._folder

    def _join(self) -> None:
        import ray

        self._head = head = head_of(self.address)
        try:  # Ray itself would try to connect for minutes
            connect(head)
        except OSError as error:
            source, change = source_of(self.address)
            raise ConfigError(
                f"{source}: nobody answers at {head} ({error}); is this the address that `ray start --head` printed, "
                f"and does it run? Else {change}"
            ) from error
        try:
            ray.init(address=head, **_quiet(joining=True))
        except ConnectionError as error:
            if "InvalidAuthToken" not in str(error.__cause__):
                raise
            raise ConfigError(
                f"cluster.address: Ray at {head} wants a token that this process does not show; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-auth-token` says on its head (or copy "
                "~/.ray/auth_token)"
            ) from error


_lock: Final = threading.Lock()
_connections: Final[list[_Connection]] = []
"""At most one entry: the present connection of this process, or its last connection."""


def _lease(address: str) -> _Connection:
    with _lock:
        now = _connections[-1] if _connections else None
        if now is None or not now.usable:
            _connections[:] = [_Connection(address, now)]
        elif now.address == address:
            now.sessions += 1
        else:
            where = now.address or "this machine"
            raise ConfigError(
                f"cluster.address: is {address!r}, but this process uses Ray at {where!r} already, and a process is in "
                "one cluster at a time; close that first"
            )
        return _connections[-1]


def _give_back(connection: _Connection) -> None:
    with _lock:
        connection.sessions -= 1
        last = not connection.sessions
    if last:
        connection.end()


def _set_variables(own: bool) -> None:
    """Set the options that Ray reads only from environment variables, when Ray is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray lowers the priority of workers
        # By default Ray gives its only node up when that is too busy to answer. `OwnSigns` watches its processes.
        os.environ.setdefault("RAY_health_check_failure_threshold", str(_MANY))
        make_token()


def _while_ray_starts() -> dict[str, str | None]:
    """Return the environment variables for the start of an own Ray.

    RAY_ADDRESS would make Ray's own processes connect to the cluster at that address. The mark is for all processes
    that Ray starts, now or later. SPT_NOENV keeps the mark where they set their title: otherwise the package
    setproctitle overwrites the environment.
    """
    return {VARIABLE: None, FAMILY: own_mark(), "SPT_NOENV": "1"}


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use the loopback as the address of its node while Ray starts. On macOS, this is Ray's default.

    On other systems, Ray uses the machine's address by default. Its processes listen there or on every interface.
    """
    constants: Any = import_module("ray._private.ray_constants")
    kept, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextmanager
def _without_monitors() -> Iterator[None]:
    """Keep Ray from starting the processes of its autoscaler, its dashboard and its logs. It has options for none."""
    node: Any = import_module("ray._private.node").Node
    names = ("start_monitor", "start_api_server", "start_log_monitor")
    kept = {name: getattr(node, name) for name in names if hasattr(node, name)}
    for name in kept:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(node, name, start)


def _refuse_what_ray_would_wait_for() -> None:
    """Raise `WhetError` for settings that would make Ray wait for a long time and report no cause."""
    port = os.environ.get("RAY_GCS_SERVER_PORT", "")
    if port.isdigit() and int(port) and is_taken(int(port)):
        raise WhetError(f"RAY_GCS_SERVER_PORT is {port}, where somebody listens; unset it, or choose another port")
    if (limit := _limit(resource.RLIMIT_FSIZE)) < _OBJECT_STORE_BYTES:
        raise WhetError(
            f"Ray's object store cannot grow to {_OBJECT_STORE_BYTES:,} bytes: that is too large where a file may have "
            f"{limit:,.0f} (ulimit -f); raise that, or set cluster.launcher to local"
        )
    if (limit := _limit(resource.RLIMIT_NOFILE)) < _LEAST_FILES:
        raise WhetError(
            f"Too many open files: a process may have {limit:,.0f} (ulimit -n), and those of Ray have 60 and more; "
            f"raise that to {_LEAST_FILES} at least, or set cluster.launcher to local"
        )


def _limit(what: int) -> float:
    soft = resource.getrlimit(what)[0]
    return math.inf if soft == resource.RLIM_INFINITY else soft


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore this process's SIGTERM handler after a block in which Ray starts or ends, because Ray replaces it.

    Ray's handler prints a stack and aborts. After Ray's end, SIGTERM kills the process at once. Python can set handlers
    only in the main thread, but the C function `sigaction` works in any thread.
    """
    sigaction = ctypes.CDLL(None).sigaction
    kept = ctypes.create_string_buffer(1024)  # more than any system's `struct sigaction`
    sigaction(signal.SIGTERM, None, kept)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, kept, None)


@contextmanager
def _without_sigterm() -> Iterator[None]:
    """Block SIGTERM for the processes that Ray starts meanwhile.

    Job managers send SIGTERM to all processes of a job, and the driver needs Ray until it has saved.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _quiet(joining: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    return options if joining else {**options, "include_dashboard": False}


def _short(*folders: str) -> str:
    return next((folder for folder in folders if len(folder) <= _LONGEST_FOLDER), folders[-1])


def _not_started(error: BaseException) -> WhetError:
    if "timed out during startup" in str(error):
        return WhetError(
            "Ray: it did not start on this machine within the half minute that it gives itself; is the machine busy, "
            f"or short of memory? Try again, or `ray start --head` first and set cluster.address{shortage()}"
        )
    return WhetError(f"Ray: {_first(error)}{shortage()}")


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    most = 7 if lines and lines[0].endswith(":") else 1  # what a colon announces is on further lines
    return f"{type(error).__name__}: {' '.join(lines[:most])}"
