"""Functions that graders call in `test_pool.py`."""

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def multiply(factor: int) -> Callable[[int], int]:
    return lambda value: value * factor


def factorial(number: int) -> int:
    return 1 if number < 2 else number * factorial(number - 1)


def slowly_made() -> Callable[[], int]:
    time.sleep(1000.0)
    return lambda: 0


def obey(what: str, *args: Any) -> Any:
    return _ORDERS[what](*args)


def _crash() -> None:
    ctypes.string_at(0)


def _die(code: int, words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    os._exit(code)


def _die_once(path: str) -> str:
    """End the process at the first call, which leaves a folder behind."""
    if not os.path.isdir(path):
        os.mkdir(path)
        os._exit(1)
    os.rmdir(path)
    return "answered"


def _stop(seconds: float) -> str:
    """Stop this process for so long, and then answer."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    return "answered"


def _forged(header: str) -> None:
    """Send a message of one's own over the connection to the driver."""
    from whet.runtime.channel import send

    opened = [int(name) for name in os.listdir("/proc/self/fd")]
    connection = next(
        fd for fd in opened if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)
    )
    send(socket.socket(fileno=connection), [header.encode()])


def _fail(words: str) -> None:
    raise ValueError(words)


def _noise(size: int) -> int:
    return sys.stderr.write("x" * size) + sys.stdout.write("y" * size)


def _write(path: str) -> None:
    try:
        with open(path, "w") as file:
            file.write("x")
    finally:
        Path(path).unlink(missing_ok=True)


def _open_many(count: int) -> int:
    return len([open("/dev/null") for _ in range(count)])


def _children() -> list[int]:
    return [subprocess.Popen(["sleep", "1000"], start_new_session=own).pid for own in (False, True)]


def _meet(mine: str, other: str) -> bool:
    """Wait until another call has come as far as this one."""
    os.mkdir(mine)
    deadline = time.monotonic() + 20.0
    while not os.path.isdir(other) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.isdir(other)


def _recurse(depth: int) -> int:
    return 0 if not depth else 1 + _recurse(depth - 1)


def _spin() -> None:
    while True:
        pass


_ORDERS: dict[str, Callable[..., Any]] = {
    "same": lambda a, b: a == b,
    "echo": lambda value: value,
    "sleep": time.sleep,
    "meet": _meet,
    "spin": _spin,
    "crash": _crash,
    "die": _die,
    "die_once": _die_once,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "fail": _fail,
    "noise": _noise,
    "write": _write,
    "files": _open_many,
    "memory": lambda size: len(bytearray(size)),
    "children": _children,
    "recurse": _recurse,
    "environment": lambda: dict(os.environ),
    "folder": lambda: [os.getcwd(), os.listdir()],
    "pid": os.getpid,
    "unsendable": lambda: object(),
    "connect": lambda port: socket.create_connection(("127.0.0.1", port)).close(),
    "read": lambda path: Path(path).read_text(),
    "signal": lambda pid: os.kill(pid, signal.SIGCONT),
    "record": lambda: __import__("whet.data.records", fromlist=["Sampling"]).Sampling(),
    "forged": _forged,
    "forge": lambda: Path,
}
