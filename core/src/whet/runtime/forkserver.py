"""A program that imports the modules of workers once, and forks itself for each worker process.

    driver ── order: modules, a line for each process ──> fork server ── fork ──> worker_process
    line   ── order, descriptors ──>      │
           <── greeting, pid, end ────────┘

The driver alone can reach the server, over the socket pair that the server was started with (see
`whet.runtime.forked`). When the driver closes the line of a process, the server ends the process. When the server
ends, the kernel ends all processes that it forked.

A fork copies only the thread that forks, and locks that other threads held stay locked. So the server must have one
thread only. Its greeting reports the number of threads. If an import has started another, the driver does not ask for a
fork, and starts its process in the normal way.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final

from whet.errors import WhetError
from whet.runtime.channel import receive, send
from whet.runtime.watchdog import die_with, kill_group, leave_signals_to_driver
from whet.runtime.wire import decode, encode
from whet.runtime.worker_process import host_workers, import_ahead, import_from

_ORDER_SECONDS: Final = 10.0
_LARGEST_ORDER: Final = 1 << 16
_PR_SET_NAME: Final = 15


class ForkServer:
    """Serves the driver's lines, and watches the processes that it forked for them."""

    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        self._waiting = select.poll()
        self._lines: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}  # descriptor of a line -> process id
        self._ends: dict[int, tuple[int, int]] = {}  # descriptor of a process -> its id, descriptor of its line
        self._waiting.register(driver, select.POLLIN)

    def serve(self) -> tuple[socket.socket, str] | None:
        """Serve until the driver is gone, then return None. In a forked process, return its connection and name."""
        while True:
            for descriptor, _ in self._waiting.poll():
                if descriptor == self._driver.fileno():
                    if not self._welcome():
                        return None
                elif descriptor in self._ends:
                    self._ended(descriptor)
                elif descriptor in self._pids:
                    self._leave(descriptor)
                elif descriptor in self._lines and (forked := self._fork(descriptor)) is not None:
                    return forked

    def _welcome(self) -> bool:
        """Take a new line from the driver. Return whether the driver is still there."""
        try:
            word, given, _, _ = socket.recv_fds(self._driver, 1, 1)
        except OSError:
            return False
        if not word or not given:  # without a line: no descriptor is left, and the driver starts its process itself
            return bool(word)
        line = socket.socket(fileno=given[0])
        line.settimeout(_ORDER_SECONDS)
        self._lines[line.fileno()] = line
        self._waiting.register(line, select.POLLIN)
        with suppress(OSError):  # `serve` notices a line that is closed
            send(line, encode({"threads": threads()}))
        return True

    def _fork(self, descriptor: int) -> tuple[socket.socket, str] | None:
        """Take an order and fork. Return connection and name in the new process, and None in the server."""
        line, given, me, pid = self._lines[descriptor], list[int](), os.getpid(), -1
        with suppress(OSError, EOFError, WhetError):  # the processes that were forked before continue
            _, given, _, _ = socket.recv_fds(line, 1, 2)
            said = decode(receive(line, _LARGEST_ORDER, time.monotonic() + _ORDER_SECONDS))
            if len(given) == 2:
                pid = os.fork()
        if pid == 0:
            return self._become(said, me, *given)
        for theirs in given:
            os.close(theirs)
        if pid < 0:
            self._leave(descriptor)
            return None
        try:
            end = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._leave(descriptor)
            return None
        self._pids[descriptor] = pid
        self._ends[end] = pid, descriptor
        self._waiting.register(end, select.POLLIN)
        self._say(descriptor, {"pid": pid})
        return None

    def _become(self, said: dict[str, Any], parent: int, connection: int, output: int) -> tuple[socket.socket, str]:
        """Become an independent process, and return its connection to the driver and its name, `ROLE-RANK`."""
        os.setsid()
        die_with(parent)
        for target in (1, 2):
            os.dup2(output, target)
        os.close(output)
        os.set_inheritable(connection, False)
        for line in (self._driver, *self._lines.values()):
            line.close()
        for end in self._ends:
            os.close(end)
        os.environ.update(said["environment"])
        words = [*sys.orig_argv[:-4], "whet.runtime.worker_process", *sys.orig_argv[-3:-1], said["name"]]
        show_command(words, said["name"])
        return socket.socket(fileno=connection), said["name"]

    def _ended(self, end: int) -> None:
        """Send the exit code of a process over its line. The zombie keeps the process id until the line is closed."""
        pid, descriptor = self._ends.pop(end)
        self._waiting.unregister(end)
        os.close(end)
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if self._pids.get(descriptor) == pid:
            self._say(descriptor, {"ended": code})
        else:
            os.waitpid(pid, 0)

    def _leave(self, descriptor: int) -> None:
        """Kill the process of a line that was closed. If the process has already ended, release its id."""
        line, pid = self._lines.pop(descriptor), self._pids.pop(descriptor, None)
        self._waiting.unregister(descriptor)
        line.close()
        if pid is None:
            return
        if any(number == pid for number, _ in self._ends.values()):
            os.kill(pid, signal.SIGKILL)  # `_ended` releases the process id
            kill_group(pid)
        else:
            os.waitpid(pid, 0)

    def _say(self, descriptor: int, words: dict[str, Any]) -> None:
        with suppress(OSError):
            send(self._lines[descriptor], encode(words))


def threads() -> int:
    """Return the number of threads of this process, including threads of C libraries."""
    return len(os.listdir("/proc/self/task"))


def show_command(words: list[str], name: str) -> None:
    """Change this process's entry in the list of processes to a command with these words, where they fit."""
    with suppress(OSError, ValueError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
            begin, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
        room = end - begin
        line = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(line) <= room:
            ctypes.memmove(begin, line.ljust(room, b"\0"), room)


def main() -> None:
    """Run as a fork server. In each forked process, run its workers."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    leave_signals_to_driver()
    os.set_inheritable(descriptor, False)
    driver = socket.socket(fileno=descriptor)
    wanted = decode(receive(driver))
    import_from(wanted["path"], wanted["add"])
    import_ahead(wanted["modules"])
    send(driver, encode({"imported": time.time()}))
    forked = ForkServer(driver).serve()
    if forked is not None:
        host_workers(*forked)


if __name__ == "__main__":
    main()
