"""The launcher: a small process without threads that forks a supervisor for each sandbox.

    driver  --settings, socket-->  launcher  --fork-->  supervisor  --fork-->  program

The driver cannot fork by itself: it has threads, open files and secrets. The launcher starts with none of them. It
ends, with all its sandboxes, when the driver closes the socket or is gone.
"""

import array
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, Final, NoReturn

from whet_sandbox.isolation import frames, namespaces, seccomp
from whet_sandbox.isolation.supervisor import Supervisor

_LARGEST_ORDER: Final = 1 << 16
_PATIENCE_SECONDS: Final = 5.0
_OLDEST_KERNEL: Final = (5, 14)


def main(descriptor: int, driver: int) -> None:
    """Start sandboxes for the driver until it is gone."""
    orders = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    launcher, waker = os.getpid(), _wakeup()
    running = set[int]()
    while os.getppid() == driver:
        ready = select.select([descriptor, waker], [], [], 1.0)[0]
        running -= _reaped()
        if waker in ready:
            os.read(waker, 4096)
        if descriptor not in ready:
            continue
        order, control = _receive(orders)
        if control is None:
            break
        pid = os.fork()
        if pid == 0:
            _supervise(control, order, proc, orders, launcher)
        control.close()
        running.add(pid)
    _end(running)


_wake_ends: list[int] = []


def _wakeup() -> int:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing)
    _wake_ends.extend((reading, writing))
    return reading


def _receive(orders: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    held = array.array("i")
    try:
        room, flags = socket.CMSG_SPACE(held.itemsize), socket.MSG_CMSG_CLOEXEC
        message, ancillary, _, _ = orders.recvmsg(_LARGEST_ORDER, room, flags)
    except OSError:
        return {}, None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            held.frombytes(data[: held.itemsize])
    if not message or not held:
        return {}, None
    return json.loads(message), socket.socket(fileno=held[0])


def _supervise(
    control: socket.socket, order: dict[str, Any], proc: int, orders: socket.socket, launcher: int
) -> NoReturn:
    """Run the supervisor of one sandbox in this process, until the launcher ends: it may have ended already."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        orders.close()
        for descriptor in _wake_ends:
            os.close(descriptor)
        try:
            first = _walls(order)
            namespaces.end_with(launcher)
        except namespaces.Refused as error:
            control.sendall(frames.pack({"is": "broken", "reason": str(error)}))
            os._exit(1)
        supervisor = Supervisor(control, proc, first)
        supervisor.serve()
        supervisor.close()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        try:
            control.sendall(frames.pack({"is": "broken", "reason": reason}))
        finally:
            os._exit(1)
    os._exit(0)


def _walls(order: dict[str, Any]) -> namespaces.FirstProcess:
    for lacks in (seccomp.supported(), _old_kernel()):
        if lacks:
            raise namespaces.Refused(lacks)
    return namespaces.enter(order)


def _old_kernel() -> str:
    release = os.uname().release
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:2])
    oldest = ".".join(map(str, _OLDEST_KERNEL))
    return f"it needs Linux {oldest}, and this is {release}" if version < _OLDEST_KERNEL else ""


def _reaped() -> set[int]:
    gone = set[int]()
    try:
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            gone.add(pid)
    except ChildProcessError:
        pass
    return gone


def _end(running: set[int]) -> None:
    """Wait until the supervisors have noticed that the driver is gone, and have ended. Kill all others."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while running and time.monotonic() < deadline:
        running -= _reaped()
        time.sleep(0.002)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
