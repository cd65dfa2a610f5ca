"""The connection of a process to Ray: a cluster of its own on this machine, or one that is there.

A process has one at a time. Sessions of one process share it, and the last one that leaves ends it; who comes while it
ends waits for that, however long it takes.

Ray is started with what would otherwise bite: always `address="local"` or a probed address, a given object store, no
dashboard, no usage statistics, no output of workers in the terminal, and a folder whose name is short enough.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from whet.errors import ConfigError, WhetError
from whet.runtime.machine import without_ray
from whet.runtime.ports import is_taken, shortage
from whet.runtime.ray_address import VARIABLE, head_of
from whet.runtime.ray_life import HeadSigns, Life, OwnSigns, connect
from whet.runtime.ray_token import hide_token, make_token, shown_token
from whet.runtime.threads import watched
from whet.runtime.watchdog import watchdog

PROCESS: Final = "whet_process"
"""The resource that processes take of a cluster of our own: what the machine has is shared out by the plan."""
_MANY: Final = 100_000
_OBJECT_STORE_BYTES: Final = 80 << 20  # about the least that Ray takes; no object of ours goes there
_LEAST_FILES: Final = 128
_LONGEST_FOLDER: Final = 20  # for a socket, whose path may have 107 characters, Ray adds up to 68, and we add 18
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
    """A share in this process's connection to Ray, which is made in the background."""

    def __init__(self, address: str = "") -> None:
        """Begin to connect to `host:port` or `auto`, or to start Ray on this machine where the address is empty."""
        if words := without_ray():
            raise ConfigError(f"cluster.launcher: {words}")
        hide_token()
        self.began = time.time()
        """In seconds since the epoch, and `there`: when Ray was there; 0.0: not yet."""
        self.there = 0.0
        self._connection = _lease(address)
        self._closed = False
        self._connection.when_there(self._note)

    @property
    def local(self) -> bool:
        """Whether it is a Ray that whet started, on this machine alone. Settled when `wait` returns."""
        return self._connection.local

    @property
    def ends_ray(self) -> bool:
        """Whether Ray ends with this session: whet started it, and nobody else in this process uses it."""
        return self.local and self._connection.sessions == 1

    @property
    def life(self) -> Life:
        """Knows whether Ray is lost; whatever may wait for Ray is asked through it."""
        return self._connection.life

    def wait(self, seconds: float) -> None:
        """Wait until Ray is there. Raises `WhetError` saying why it is not."""
        self._connection.wait(seconds)

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

    def _note(self) -> None:
        self.there = time.time()

    def close(self) -> None:
        """Leave Ray, and end it where nobody else needs it. Safe to call twice."""
        if not self._closed:
            self._closed = True
            _give_back(self._connection)


class _Connection:
    """Ray, used from one thread that stays: its processes end with the thread that started them."""

    def __init__(self, address: str, before: "_Connection | None") -> None:
        self.address, self.local = address, not address
        self.life = Life()
        self.sessions = 1
        self._before = before
        self._head = ""
        """`host:port` of a cluster that was joined."""
        self._folder: Path | None = None
        self._own: OwnSigns | None = None
        self._ready: Future[None] = Future()
        self._leaving = threading.Event()
        self._thread = watched("whet-ray", self._live, self._lost, lambda: True)

    @property
    def usable(self) -> bool:
        """Whether another session can share it."""
        failed = self._ready.done() and self._ready.exception()
        return self.sessions > 0 and not failed and not self.life.lost.done()

    def when_there(self, note: Callable[[], None]) -> None:
        """Call that once Ray is there, or it is known why not."""
        self._ready.add_done_callback(lambda _: note())

    def wait(self, seconds: float) -> None:
        """Wait until Ray is there. Raises `WhetError` saying why it is not."""
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
        """Leave Ray; wait for it, but not for ever."""
        self._leaving.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() and self._own is not None:
            self._own.kill()
            self._thread.join(_END_SECONDS)

    def _lost(self, words: str) -> None:
        with suppress(InvalidStateError):
            self._ready.set_exception(WhetError(words))
        with suppress(InvalidStateError):
            self.life.lost.set_result(words)

    def _live(self) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        _set_variables(self.local)
        breakpoints = os.environ.get("PYTHONBREAKPOINT")
        there = sys.modules.get("ray")
        if there is not None and there.is_initialized():  # by whoever uses whet as a library; it is theirs to end
            self.local = False
            self._ready.set_result(None)
            return
        try:
            with shown_token(self._made_folder()), _own_sigterm():
                import_module("ray")  # reads some of the environment by itself
                self._start() if self.local else self._join()
            _restore("PYTHONBREAKPOINT", breakpoints)  # Ray puts its own debugger there, for its tasks
            self._own = OwnSigns() if self.local else None
        except BaseException as error:
            self._ready.set_exception(error if isinstance(error, WhetError) else _not_started(error))
        else:
            self._ready.set_result(None)
            self.life.watch(self._own or HeadSigns(self._head), self._leaving)
        if self._own is not None and self.life.lost.done():
            self._own.kill()
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
        # No CPUs: Ray starts an idle worker for each.
        with _without_address(), _on_loopback():
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
        try:  # Ray itself would try for minutes
            connect(head)
        except OSError as error:
            raise ConfigError(
                f"cluster.address: nobody answers at {head} ({error}); is this the address that `ray start --head` "
                "printed, and does it run?"
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
"""The one of this process: that of now, or the last one."""


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
    """Tell Ray what it takes from the environment alone, and reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if own:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default workers yield to whatever else there is
        make_token()


@contextmanager
def _without_address() -> Iterator[None]:
    """Hide the address of another cluster from a Ray that starts: its own processes would go there."""
    named = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        _restore(VARIABLE, named)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make a Ray that starts take the loopback for the address of its node, as it does by itself on macOS.

    Elsewhere it takes the machine's own address, and its processes listen there or on every interface.
    """
    constants: Any = import_module("ray._private.ray_constants")
    kept, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


def _refuse_what_ray_would_wait_for() -> None:
    """Raise `WhetError` where Ray would wait for long, and not say for what."""
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
    """Leave it to this process what SIGTERM does. Ray has it print a stack and abort, and when it ends, kill at once.

    Python sets handlers in its main thread alone; this is any thread's.
    """
    sigaction = ctypes.CDLL(None).sigaction
    kept = ctypes.create_string_buffer(1024)  # more than any system's `struct sigaction`
    sigaction(signal.SIGTERM, None, kept)
    try:
        yield
    finally:
        sigaction(signal.SIGTERM, kept, None)


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


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
    lines: Iterable[str] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {next(iter(lines), '')}"
