"""No process outlives the driver: a watchdog process kills what the driver started when it dies, however it dies.

    driver  --"group 123"-->  watchdog     kills the groups, and everything marked as the driver's, when the driver
    driver  --"done 123"--->               is gone; ends by itself when there is nothing left to guard

This file is both the driver's handle and the watchdog's own program, which sees the standard library alone.
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
"""Environment variable that marks every process that a driver starts, and so what those start in turn."""
_PR_SET_PDEATHSIG = 1
_PATIENCE_SECONDS = 2.0


class Watchdog:
    """The driver's handle: one watchdog process while anything is guarded."""

    def __init__(self) -> None:
        self.family = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.detached = False
        """Whether the watchdog's process is to be nobody's child, for whoever kills this one kills its children too."""
        self._guarded: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def guard(self, kind: str, name: str) -> None:
        """Guard a `group` of processes, a single `process`, or a `folder` of temporary files."""
        with self._lock:
            self._guarded.add(f"{kind} {name}")
            if self._process is None or not self._say(f"{kind} {name}"):
                self._start()

    def release(self, kind: str, name: str) -> None:
        """Guard it no longer, because it is gone."""
        with self._lock:
            self._guarded.discard(f"{kind} {name}")
            if self._process is None:
                return
            # The last one too: the watchdog would take the end of its input for that of the driver, and kill whatever
            # another thread has started and not guarded yet.
            heard = self._say(f"done {kind} {name}")
            if self._guarded and not heard:
                self._start()
            elif not self._guarded:
                process, self._process = self._process, None
                try:
                    process.communicate(timeout=_PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:  # it was stopped, and has nothing left to do
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
        except OSError:  # somebody killed it
            return False
        return True


_watchdogs: dict[int, Watchdog] = {}


def watchdog() -> Watchdog:
    """Give this process's watchdog."""
    return _watchdogs.setdefault(os.getpid(), Watchdog())


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; where there is no such kernel, nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def leave_signals_to_driver() -> None:
    """Live through SIGTERM, SIGINT and SIGHUP: job managers send them to all processes, and the driver has yet to save.

    Ignored by a handler rather than by SIG_IGN, which the programs that this process starts would inherit.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)


def kill_group(group: int) -> None:
    """Kill a group of processes, where there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def pidfd(process: int) -> int:
    """Give a descriptor of a process, which no other one gets that is given its number later; -1: there is none."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):  # not Linux, or it has ended
        return -1


def kill_pidfd(descriptor: int) -> None:
    """Kill a process, where there is one and it lives."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


def close_pidfd(descriptor: int) -> None:
    """Let go of it."""
    if descriptor >= 0:
        os.close(descriptor)


def kill_marked(mark: str) -> None:
    """Kill every process whose mark begins so: also those that have left their group."""
    for _ in range(10):
        marked = _marked(mark)
        for process in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not marked:
            return
        time.sleep(0.005)


def _marked(mark: str) -> list[int]:
    """Find the living processes whose environment began with the mark. Linux; elsewhere none are seen."""
    wanted, found = f"{FAMILY}={mark}".encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if any(entry.startswith(wanted) for entry in environment.read().split(b"\0")):
                    found.append(int(name))
    return found


def _watch(driver: int, family: str) -> None:
    """Take commands until the driver is gone, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    with contextlib.suppress(AttributeError, OSError):  # a child of the driver may hold the pipe open
        waiting.register(os.pidfd_open(driver), select.POLLIN)
    os.set_blocking(0, False)
    guarded: dict[str, int] = {}
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
                close_pidfd(guarded.pop(rest, -1))
            else:
                guarded[line.decode()] = pidfd(int(rest)) if word == "process" else -1
    _end(guarded, family)


def _end(guarded: dict[str, int], family: str) -> None:
    for descriptor in guarded.values():
        kill_pidfd(descriptor)
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
