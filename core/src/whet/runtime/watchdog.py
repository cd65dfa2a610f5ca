"""A watchdog process. When the driver dies, for whatever reason, it kills all processes that the driver started.

    driver  --"group 123"------->  watchdog     when the driver is gone, it kills the groups that are guarded, and all
    driver  --"done group 123"-->               processes with the driver's mark; it ends when nothing is guarded

This file holds the driver's handle and also the program of the watchdog process. That program imports the standard
library only.
"""

import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

FAMILY = "WHET_FAMILY"
"""The environment variable that marks every process that a driver starts. Its child processes inherit the mark."""
_PR_SET_PDEATHSIG = 1
_PATIENCE_SECONDS = 2.0


class Watchdog:
    """The driver's handle. One watchdog process runs while anything is guarded."""

    def __init__(self) -> None:
        self.family = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.detached = False
        """Whether the watchdog is no child of this process, for a system that kills this process with its children."""
        self._guarded: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def guard(self, kind: str, name: str) -> None:
        """Guard a `group` of processes or a `folder` of temporary files."""
        with self._lock:
            self._guarded.add(f"{kind} {name}")
            if self._process is None or not self._say(f"{kind} {name}"):
                self._start()

    def release(self, kind: str, name: str) -> None:
        """Stop guarding something, because it is gone."""
        with self._lock:
            self._guarded.discard(f"{kind} {name}")
            if self._process is None:
                return
            # The last release is sent too. Else the watchdog would take the end of its input for the end of the driver,
            # and kill a process that another thread has started and not guarded yet.
            heard = self._say(f"done {kind} {name}")
            if self._guarded and not heard:
                self._start()
            elif not self._guarded:
                process, self._process = self._process, None
                try:
                    process.communicate(timeout=_PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:  # the watchdog is suspended, and has nothing left to do
                    process.kill()
                    process.wait()

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.family, "detached" * self.detached]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, env={}, cwd="/"
        )
        if self.detached:
            self._process.wait()
        for line in sorted(self._guarded):
            self._say(line)

    def _say(self, line: str) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:  # the watchdog was killed
            return False
        return True


_watchdogs: dict[int, Watchdog] = {}


def watchdog() -> Watchdog:
    """Return the watchdog of this process."""
    return _watchdogs.setdefault(os.getpid(), Watchdog())


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent thread ends, on Linux. Exit if the parent is gone already."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def leave_signals_to_driver() -> None:
    """Ignore SIGTERM, SIGINT, SIGHUP and SIGUSR1.

    Job managers send them to all processes, but the driver must save first.
    An empty handler ignores them rather than SIG_IGN, because programs that this process starts would inherit SIG_IGN.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)


def kill_group(group: int) -> None:
    """Kill a process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill every process whose mark begins with `mark`, also a process that has left its group."""
    for _ in range(10):
        marked = _marked(mark)
        for process in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.005)


def _marked(mark: str) -> list[int]:
    """Return the numbers of the running processes whose mark begins with `mark`. Without `/proc` the list is empty."""
    wanted, found = f"{FAMILY}={mark}".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if any(entry.startswith(wanted) for entry in environment.read().split(b"\0")):
                    found.append(int(name))
    return found


def _watch(driver: int, family: str) -> None:
    """Read commands until the driver is gone, then kill what is still guarded."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    with contextlib.suppress(AttributeError, OSError):  # a child of the driver may hold the pipe open
        waiting.register(os.pidfd_open(driver), select.POLLIN)
    os.set_blocking(0, False)
    guarded: set[str] = set()
    text, alive = b"", True
    while alive:
        alive = all(descriptor == 0 for descriptor, _ in waiting.poll())
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(0, 1 << 16):
                text += chunk
            alive = False
        *lines, text = text.split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "done":
                guarded.discard(rest)
            else:
                guarded.add(line.decode())
    _end(guarded, family)


def _end(guarded: set[str], family: str) -> None:
    things = [thing.split(" ", 1) for thing in guarded]
    for group in (name for kind, name in things if kind == "group"):
        kill_group(int(group))
    if things:
        kill_marked(f"{family}.")
    for folder in (name for kind, name in things if kind == "folder"):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[3] and os.fork():
        os._exit(0)
    _watch(int(sys.argv[1]), sys.argv[2])
