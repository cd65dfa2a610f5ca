"""The owner's end of processes that a fork server makes; see `whet.runtime.forkserver`.

A launcher has `ForkServers`, which begin to import; in place of a `Child` there is then a `Forked` wherever
`ForkServers.of` gives a server.
"""

import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whet.data.spans import Span
from whet.errors import WhetError
from whet.runtime.channel import of_this_user, receive, send
from whet.runtime.process import Child, Offspring, describe_end, new_mark
from whet.runtime.threads import watched
from whet.runtime.watchdog import FAMILY
from whet.runtime.wire import decode, encode

if TYPE_CHECKING:
    from whet.runtime.launcher import Host

_MOST_WAITING: Final = 1024
_STEP_SECONDS: Final = 0.2
_FORK_SECONDS: Final = 30.0
_END_SECONDS: Final = 5.0
_WORD_SECONDS: Final = 2.0
_LARGEST_WORD: Final = 1 << 16
_ALONE: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a fork server itself: NumPy starts its threads when it is imported."""
_OF_EACH: Final = ("GLOO_SOCKET_IFNAME",)
"""Variables that processes of one fork server need not have alike."""


class NoForkServer(WhetError):  # noqa: N818 - it says what there is
    """There is none that forks; nothing has happened to the connection yet."""


class Forked(Offspring):
    """A process that hosts workers, forked from one that had imported what they need. See `Child`."""

    def __init__(
        self,
        server: str,
        name: str,
        *,
        environment: Mapping[str, str],
        output: int,
        connection: socket.socket | None = None,
        patience_seconds: float = _FORK_SECONDS,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Have it made, at the end of a new socket pair or of a connection that is there, which becomes its alone.

        `environment` is added to the server's; what it writes goes to the descriptor `output`. Raises `NoForkServer`
        where the server is not ready in time, is gone, must not fork, or `stopped()` meanwhile, and where it fails or
        ends while it forks; a connection that was given is then still the caller's.
        """
        self._line = _greeted(server, time.monotonic() + patience_seconds, stopped)
        self.socket, theirs = socket.socketpair() if connection is None else (connection, connection)
        mark = new_mark()
        try:
            order = {"name": name, "environment": {**environment, FAMILY: mark}}
            pid, self._end = _begun(self._line, order, theirs, output)
        except BaseException as error:
            self._line.close()
            if connection is None:
                self.socket.close()
                theirs.close()
            if isinstance(error, OSError | EOFError | WhetError):
                raise NoForkServer("the fork server failed while it forked") from error
            raise
        theirs.close()
        self._line.settimeout(None)
        super().__init__(pid, mark)
        self._code: int | None = None
        self._server = ""
        """What became of the server, where nobody gives the code."""

    def _linger(self) -> bool:
        _readable(self._line, self._end)
        try:
            # The server hears of the end as soon as this process does, unless it is stopped.
            self._code = int(_said(self._line, time.monotonic() + _WORD_SECONDS)["ended"])
            return True
        except TimeoutError:
            self._server = "it came from a fork server that does not say how"
            return True
        except (OSError, EOFError, WhetError):  # the server is gone, and the kernel has ended the process with it
            self._server = "it was killed with the fork server that it came from"
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._end, signal.SIGKILL)
            _readable(self._end, seconds=_END_SECONDS)
            return False

    def _reap(self) -> int:
        self._line.close()
        os.close(self._end)
        return -signal.SIGKILL if self._code is None else self._code

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # where the server is gone nobody has kept the zombie
            signal.pidfd_send_signal(self._end, number)

    def end(self) -> str:
        """Wait for its end, end what it started, and say how it ended."""
        code = describe_end(self.wait())
        return code if self._code is not None else f"its process ended: {self._server}"


class ForkServer:
    """One fork server, a child of this process."""

    def __init__(
        self,
        title: str,
        modules: Sequence[str],
        folders: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        patience_seconds: float = _FORK_SECONDS,
    ) -> None:
        """Start it in the background. `folders` say where it imports from, as `Launcher.import_folders` does."""
        self.name = f"whet-{secrets.token_hex(16)}"
        self.patience_seconds = patience_seconds
        """How long who wants a process waits for it to be ready."""
        self.began, self.imported = time.time(), 0.0
        """When it was asked for and when it had imported, in seconds since the epoch; 0.0: not yet."""
        self._title, self._environment, self._log = title, environment, log
        self._order = encode({**folders, "modules": list(modules)})
        self._child: Child | None = None
        self._closed = False
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")  # without a file, which nobody would remove after a kill
        self._listening.listen(_MOST_WAITING)
        self._thread = watched(f"whet-{title.strip()}", self._live, over=lambda: True)

    def close(self) -> None:
        """End it, and with it what it forked."""
        self._closed = True
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
        self._thread.join(_END_SECONDS)
        with suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _live(self) -> None:
        """Start it from a thread that lives as long as it may: the kernel ends it with this thread."""
        with suppress(OSError), self._log.open("ab") as log:
            with self._listening:
                self._child = Child(
                    "whet.runtime.forkserver", self._title, environment=self._environment, stdout=log, stderr=log
                )
                with suppress(OSError):
                    socket.send_fds(self._child.socket, [b"+"], [self._listening.fileno()])
                    send(self._child.socket, self._order)
            if self._closed:
                self._child.signal(signal.SIGKILL)
            with suppress(OSError, EOFError, WhetError):
                self.imported = float(_said(self._child.socket)["imported"])
            self._child.wait()
            self._child.socket.close()


class ForkServers:
    """The fork servers of a launcher: one for all processes of as many threads, which share an environment."""

    def __init__(self, environment: Callable[[int], Mapping[str, str]], least: int) -> None:
        """Take the environment of processes with so many threads. For fewer than `least` of them there is none."""
        self._environment, self._least = environment, least
        self._servers: dict[str, ForkServer] = {}
        """By the name of each process."""

    def start(
        self,
        modules: "Mapping[Host, Sequence[str]]",
        folders: Mapping[str, Any],
        logs: Path,
        patience_seconds: float,
    ) -> None:
        """Start those that are worth it for such processes, without waiting for it."""
        if not hasattr(os, "pidfd_open"):
            return
        for threads in sorted({host.threads for host in modules}):
            alike = [host for host in modules if host.threads == threads]
            if len(alike) < self._least:
                continue
            wanted = list(dict.fromkeys(module for host in alike for module in modules[host]))
            # Room for the names that the forked processes will show, and for that of their module, which is longer.
            title = "fork-server".ljust(max(len(host.name) for host in alike) + len("worker_process"))
            environment = {**self._environment(threads), **_ALONE}
            log = logs / f"fork-server-{threads}.log"
            server = ForkServer(title, wanted, folders, environment, log, patience_seconds)
            self._servers |= dict.fromkeys((host.name for host in alike), server)

    def of(self, name: str) -> ForkServer | None:
        """Give the server for a process, where there is one."""
        return self._servers.get(name)

    def spans(self) -> list[Span]:
        """Give the imports, as far as they are over."""
        return [Span("run", "import", s.began, s.imported - s.began) for s in self._all() if s.imported]

    def close(self) -> None:
        """End them all."""
        for server in self._all():
            server.close()
        self._servers.clear()

    def _all(self) -> list[ForkServer]:
        return list(dict.fromkeys(self._servers.values()))


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of a process that its fork server does not have."""
    return {name: environment[name] for name in (*_ALONE, *_OF_EACH) if name in environment}


def _greeted(server: str, deadline: float, stopped: Callable[[], bool]) -> socket.socket:
    """Give a line to a server that is ready to fork."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(f"\0{server}")
        if not of_this_user(line):
            raise NoForkServer("the fork server is another user's")
        while not _readable(line, seconds=_STEP_SECONDS):
            if stopped() or time.monotonic() > deadline:
                raise NoForkServer("the fork server is not ready")
        found = _said(line, time.monotonic() + _FORK_SECONDS)["threads"]
        if found != 1:
            raise NoForkServer(f"the fork server has {found} threads, of which a fork would copy one")
    except BaseException as error:
        line.close()
        if isinstance(error, OSError | EOFError):
            raise NoForkServer("the fork server is gone") from error
        raise
    return line


def _begun(line: socket.socket, order: Mapping[str, Any], connection: socket.socket, output: int) -> tuple[int, int]:
    """Have a process forked and let it begin; give its number and a descriptor of it."""
    waiting, go = os.pipe()
    with os.fdopen(go, "wb", buffering=0) as permit:
        with os.fdopen(waiting, "rb"):  # which its process alone has from here on
            socket.send_fds(line, [b"+"], [connection.fileno(), output, waiting])
        send(line, encode(order))
        pid = int(_said(line, time.monotonic() + _FORK_SECONDS)["pid"])
        end = os.pidfd_open(pid)
        try:
            if _readable(line, seconds=0.0):
                raise EOFError("it has ended, and its processes with it")
            permit.write(b"+")
        except BaseException:
            os.close(end)
            raise
    return pid, end


def _readable(*ends: socket.socket | int, seconds: float | None = None) -> bool:
    """Wait until one of these has something to say; `select` would know none beyond the first thousand descriptors."""
    waiting = select.poll()
    for end in ends:
        waiting.register(end, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1000 * seconds))


def _said(line: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    return dict(decode(receive(line, _LARGEST_WORD, deadline)))
