"""A child process that cannot outlive the driver: its own session, a socket to it, and an end with all it started."""

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from whet.runtime.interpreters import surroundings
from whet.runtime.log_excerpt import last_lines
from whet.runtime.watchdog import FAMILY, kill_group, kill_marked, watchdog

_marks = itertools.count()


class Offspring(ABC):
    """A process of this machine that was started for this one, and that ends with all it started.

    A signal reaches it, and never another process that got its number.
    """

    def __init__(self, pid: int, mark: str) -> None:
        """Take its number, which is that of its group and session too, and the mark of all that it starts."""
        self.pid, self._mark = pid, mark
        self._lock, self._over = threading.Lock(), False
        watchdog().guard("group", str(pid))

    @abstractmethod
    def _linger(self) -> bool:
        """Wait for its end; say whether nobody else can have got its number."""

    @abstractmethod
    def _reap(self) -> int:
        """Let go of its number, and give its exit code."""

    def _send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for its end, end what it started, and give its exit code."""
        if self._linger():
            kill_group(self.pid)
        kill_marked(self._mark)
        with self._lock:
            code = self._reap()
            self._over = True
        watchdog().release("group", str(self.pid))
        return code

    def end(self) -> str:
        """Wait for its end, end what it started, and say how it ended."""
        return describe_end(self.wait())

    def state(self) -> str:
        """Give the kernel's letter for what it does, e.g. `T`: stopped. Empty where there is no `/proc`."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def show_stacks(self) -> None:
        """Let it write what its threads do to its stderr, if it has come to where it can; see `worker_process`."""
        try:
            with open(f"/proc/{self.pid}/status", encoding="utf-8", errors="replace") as status:
                caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")), 0)
        except OSError:
            return
        if caught >> (signal.SIGUSR1 - 1) & 1:  # else it would die of it
            self.signal(signal.SIGUSR1)

    def signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, where it still lives. After SIGKILL `wait` gives the exit code."""
        with self._lock:
            if not self._over:
                self._send(number)


class Child(Offspring):
    """A Python process that runs a module of whet as its program.

    Start it from a thread that lives as long as it should: the kernel kills it when that thread ends.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        environment: Mapping[str, str],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        folder: Path | None = None,
        connection: socket.socket | None = None,
        python: str = "",
    ) -> None:
        """Start it at the end of a new socket pair, or of a connection that is there, which becomes its alone.

        `python` is its interpreter; empty: that of this process.
        """
        self.socket, theirs = socket.socketpair() if connection is None else (connection, connection)
        mark = new_mark()
        command = [python or sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), name]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    env={**(surroundings(python, environment) if python else environment), FAMILY: mark},
                )
            except BaseException:
                self.socket.close()
                raise
        super().__init__(self._process.pid, mark)

    @property
    def stdout(self) -> IO[bytes] | None:
        """Where it was asked for as a pipe."""
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """Where it was asked for as a pipe."""
        return self._process.stderr

    def ended(self, patience_seconds: float) -> bool:
        """Wait a moment for its end, without ending anything."""
        deadline = time.monotonic() + patience_seconds
        with suppress(ChildProcessError):
            while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.002)
        return True

    def _linger(self) -> bool:
        with suppress(ChildProcessError):  # somebody else waited for it
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # a zombie keeps its number
        return True

    def _reap(self) -> int:
        return self._process.wait()


def new_mark() -> str:
    """Give a mark, for `FAMILY`, by which the watchdog knows a process and all that it starts."""
    return f"{watchdog().family}.{next(_marks)}."


def worker_environment(own: Mapping[str, str], threads: int, gpus: str) -> dict[str, str]:
    """Give the environment variables of a process that hosts workers, on top of its parent's own.

    Threads wait for work passively (OMP_WAIT_POLICY=PASSIVE) unless the parent's environment says otherwise: spinning
    threads are a little faster on a quiet machine and many times slower on a shared one.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **own,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": gpus,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def on_loopback(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process whose ranks are all on this machine: gloo listens on the loopback alone.

    By itself it listens at the address of this machine's name, which others may reach. `own` has the last word.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    return {**({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}), **own}


def import_folders() -> list[str]:
    """Give the folders from which this process imports, so that another one imports the same modules."""
    return [os.path.abspath(folder) for folder in sys.path]


def foreign_folders() -> list[str]:
    """Give the folders from which this process imports and which are not its interpreter's own."""
    own = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    inside = tuple(prefix + os.sep for prefix in own)
    return [folder for folder in import_folders() if not os.path.realpath(folder).startswith(inside)]


def extra_folders() -> list[str]:
    """Give the folders from which this process imports beside what is installed: a script's own, PYTHONPATH.

    All that another interpreter may see of it: what is installed there is its own.
    """
    return [folder for folder in import_folders() if folder not in _installed()]


@functools.cache
def _installed() -> frozenset[str]:
    """Give the folders from which every process of this interpreter imports, those that are installed by a path too."""
    show = "import sys; print(*sys.path, sep=chr(0), end='')"
    done = subprocess.run([sys.executable, "-E", "-P", "-c", show], capture_output=True, text=True, check=True)
    return frozenset(map(os.path.abspath, done.stdout.split(chr(0))))


def describe_end(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; where nobody did that by hand, the machine may have run out of memory" if code == -signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}"


def last_words(log: Path, begin: int = 0, lines: int = 20) -> str:
    """Give the last lines that a process wrote to its log, and what it died of, without control characters."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - (1 << 16)))
            return printable(file.read(), lines)
    except OSError:
        return ""


def printable(text: bytes, lines: int = 20) -> str:
    """Decode the last lines of output, see `last_lines`; what could steer a terminal is shown, not sent."""
    kept = last_lines(text.decode(errors="replace").rstrip().splitlines(), lines)
    return "\n".join(
        "".join(letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1] for letter in line)[:2000]
        for line in kept
    )
