"""The owner's end of processes that a fork server makes; see `whet.runtime.forkserver`.

A launcher starts a `ForkServer`, which imports modules, and makes a `Forked` in place of a `Child` for each process
that imports them.
"""

import os
import select
import signal
import socket
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from whet.errors import WhetError
from whet.runtime.channel import receive, send
from whet.runtime.process import Child, Offspring, describe_end, new_mark
from whet.runtime.threads import watched
from whet.runtime.watchdog import FAMILY
from whet.runtime.wire import decode, encode

_STEP_SECONDS: Final = 0.2
_FORK_SECONDS: Final = 30.0
_END_SECONDS: Final = 5.0
_WORD_SECONDS: Final = 2.0
_LARGEST_WORD: Final = 1 << 16
_ALONE: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a fork server itself: with more threads, NumPy would start them when it is imported."""
_OF_EACH: Final = ("GLOO_SOCKET_IFNAME",)
"""Variables that may differ between the processes of one fork server."""


class NoForkServer(WhetError):  # noqa: N818 - it says what there is
    """No fork server can fork the process."""


class Forked(Offspring):
    """A process that hosts workers, forked from a server that has imported their modules. See `Child`."""

    def __init__(
        self, server: "ForkServer", name: str, *, environment: Mapping[str, str], output: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Ask the server to fork the process, and give the process one end of a new socket pair.

        `environment` is added to the server's. The process writes its output to the descriptor `output`. Raises
        `NoForkServer` when the server is not ready in time, is gone, must not fork, or fails while it forks, and when
        `stopped()` becomes true during the wait.
        """
        self._line = _greeted(server, stopped)
        self.socket, theirs = socket.socketpair()
        mark = new_mark()
        try:
            with theirs:
                socket.send_fds(self._line, [b"+"], [theirs.fileno(), output])
            send(self._line, encode({"name": name, "environment": {**environment, FAMILY: mark}}))
            pid = int(_said(self._line, time.monotonic() + _FORK_SECONDS)["pid"])
            self._end = os.pidfd_open(pid)
        except BaseException as error:
            self._line.close()
            self.socket.close()
            if isinstance(error, OSError | EOFError | WhetError):
                raise NoForkServer("the fork server failed while it forked") from error
            raise
        self._line.settimeout(None)
        super().__init__(pid, mark)
        self._code: int | None = None
        self._server = ""
        """What happened to the server, when it does not report the exit code."""

    def _linger(self) -> bool:
        _readable(self._line, self._end)
        try:
            # The server learns of the end as soon as this process does, unless the server is stopped.
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
        with suppress(ProcessLookupError):  # without the server nobody keeps the zombie
            signal.pidfd_send_signal(self._end, number)

    def end(self) -> str:
        """Wait until the process has ended, end all that it started, and return how it ended, in words."""
        code = describe_end(self.wait())
        return code if self._code is not None else f"its process ended: {self._server}"


class ForkServer:
    """One fork server, a child of this process."""

    def __init__(
        self, title: str, modules: Sequence[str], folders: Mapping[str, Any], environment: Mapping[str, str],
        log: Path, patience_seconds: float = _FORK_SECONDS,
    ) -> None:  # fmt: skip
        """Start the server in the background. It imports from `folders`, as in `Launcher.import_folders`."""
        self.patience_seconds = patience_seconds
        """How long an owner that wants a process waits for the server to be ready."""
        self.began, self.imported = time.time(), 0.0
        """When the start began and when the imports were done, in seconds since the epoch; 0.0: not done yet."""
        self._title, self._environment, self._log = title, {**environment, **_ALONE}, log
        self._child: Child | None = None
        self._closed = False
        self._control, self._theirs = socket.socketpair()
        send(self._control, encode({**folders, "modules": list(modules)}))
        self._thread = watched(f"whet-{title.strip()}", self._live, over=lambda: True)

    def line(self) -> socket.socket:
        """Return a new connection to the server, which may still start. Raises `OSError` when the server is gone.

        The server's end crosses the socket pair that the server was started with, so no other process can reach it.
        """
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                rights = array("i", [theirs.fileno()])
                self._control.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)
            except BaseException:
                mine.close()
                raise
        return mine

    def close(self) -> None:
        """Kill the server, and with it the processes that it forked."""
        self._closed = True
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
        self._thread.join(_END_SECONDS)
        with suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _live(self) -> None:
        """Start the server and wait for its end, on one thread: the kernel ends the server with the thread."""
        with suppress(OSError), self._log.open("ab") as log:
            self._child = Child(
                "whet.runtime.forkserver", self._title, environment=self._environment, stdout=log, stderr=log,
                connection=self._theirs,
            )  # fmt: skip
            if self._closed:
                self._child.signal(signal.SIGKILL)
            with suppress(OSError, EOFError, WhetError):
                self.imported = float(_said(self._control)["imported"])
            self._child.wait()
            self._control.close()


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that its fork server may not have, or has with another value."""
    return {name: environment[name] for name in (*_ALONE, *_OF_EACH) if name in environment}


def _greeted(server: ForkServer, stopped: Callable[[], bool]) -> socket.socket:
    """Return a connection to a fork server that is ready to fork. Raises `NoForkServer` when it cannot fork."""
    deadline = time.monotonic() + server.patience_seconds
    try:
        line = server.line()
    except OSError as error:
        raise NoForkServer("the fork server is gone") from error
    try:
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


def _readable(*ends: socket.socket | int, seconds: float | None = None) -> bool:
    """Wait until one of these can be read, and return whether one can.

    This uses `poll`, because `select` refuses descriptors above 1023.
    """
    waiting = select.poll()
    for end in ends:
        waiting.register(end, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1000 * seconds))


def _said(line: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    return dict(decode(receive(line, _LARGEST_WORD, deadline)))
