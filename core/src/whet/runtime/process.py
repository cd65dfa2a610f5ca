"""A child process that cannot outlive the driver. It has its own session and a socket to the driver.

When it ends, all processes that it started end too.
"""

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from whet.moved import leading_on
from whet.runtime.interpreters import surroundings
from whet.runtime.watchdog import FAMILY, kill_group, kill_marked, watchdog

_marks = itertools.count()


class Offspring(ABC):
    """A process on this machine that was started for the current process. All that it starts ends with it.

    `signal` never hits another process that has the same number later.
    """

    def __init__(self, pid: int, mark: str) -> None:
        """Take the process's number and its mark.

        The number is also the number of its process group and session. All processes that it starts carry the mark.
        """
        self.pid, self._mark = pid, mark
        self._lock, self._over = threading.Lock(), False
        watchdog().guard("group", str(pid))

    @abstractmethod
    def _linger(self) -> bool:
        """Wait until the process ends. Return whether its number still belongs to it."""

    @abstractmethod
    def _reap(self) -> int:
        """Release the process's number, and return its exit code."""

    def _send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait until the process ends, kill what it started, and return its exit code."""
        if self._linger():
            kill_group(self.pid)
        kill_marked(self._mark)
        with self._lock:
            code = self._reap()
            self._over = True
        watchdog().release("group", str(self.pid))
        return code

    def end(self) -> str:
        """Wait until the process ends, kill what it started, and return a sentence on how it ended."""
        return describe_end(self.wait())

    def state(self) -> str:
        """Return the kernel's letter for the process's state, such as `T` for stopped, or "" where it is not known."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def show_stacks(self) -> None:
        """Signal the process to write the stacks of its threads to its stderr.

        Do nothing where the process has not installed its handler yet; see `worker_process.host_workers`.
        """
        try:
            with open(f"/proc/{self.pid}/status", encoding="utf-8", errors="replace") as status:
                caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")), 0)
        except OSError:
            return
        if caught >> (signal.SIGUSR1 - 1) & 1:  # without a handler the signal would kill the process
            self.signal(signal.SIGUSR1)

    def signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process, if it is still running. After SIGKILL, `wait` returns the exit code."""
        with self._lock:
            if not self._over:
                self._send(number)


class Child(Offspring):
    """A Python process that runs a module of whet as its program.

    Start it from a thread that lives as long as the process should: the kernel kills the process when the thread ends.
    """

    def __init__(
        self, module: str, name: str, *, environment: Mapping[str, str], stdout: int | IO[bytes],
        stderr: int | IO[bytes], folder: Path | None = None, connection: socket.socket | None = None,
        python: str = "",
    ) -> None:  # fmt: skip
        """Start the process with one end of a new socket pair, or with `connection`, which only the child keeps.

        `python` is the child's interpreter; where it is empty, the child uses this process's interpreter.
        """
        self.socket, theirs = socket.socketpair() if connection is None else (connection, connection)
        mark = new_mark()
        command = [python or sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), name]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
                    stdout=stdout, stderr=stderr, cwd=folder,
                    env={**(surroundings(python, environment) if python else environment), FAMILY: mark},
                )  # fmt: skip
            except BaseException:
                self.socket.close()
                raise
        super().__init__(self.process.pid, mark)

    def _linger(self) -> bool:
        with suppress(ChildProcessError):  # other code has waited for the process already
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # a zombie process keeps its number
        return True

    def _reap(self) -> int:
        return self.process.wait()


def new_mark() -> str:
    """Return a new value for `FAMILY`, which marks a process and all processes that it starts for the watchdog."""
    return f"{watchdog().family}.{next(_marks)}."


def worker_environment(own: Mapping[str, str], threads: int, gpus: str) -> dict[str, str]:
    """Return the environment variables of a worker process: those of its parent, `own`, and the settings for workers.

    Threads wait for work passively (OMP_WAIT_POLICY=PASSIVE) unless `own` sets it otherwise. Spinning threads are a
    little faster on an idle machine and many times slower on a shared one.
    """
    return {
        "OMP_WAIT_POLICY": "PASSIVE", **own, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": gpus, "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def on_loopback(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables `own`, with a setting that makes gloo listen on the loopback only.

    It is for processes whose ranks are all on this machine. By default gloo listens at the address of the machine's
    name, which other machines may reach. A value of the variable in `own` is kept.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    return {**({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}), **own}


def import_folders() -> list[str]:
    """Return the folders from which this process imports, so that another process can import the same modules."""
    return [os.path.abspath(folder) for folder in sys.path]


def extra_folders() -> list[str]:
    """Return the folders from which this process imports that are not installed: a script's folder, PYTHONPATH.

    A process of another interpreter gets only these folders, because that interpreter has its own installed packages.
    """
    return [folder for folder in import_folders() if folder not in _installed()]


@functools.cache
def _installed() -> frozenset[str]:
    """Return the folders from which every process of this interpreter imports, with the folders in `.pth` files."""
    show = "import sys; print(*sys.path, sep=chr(0), end='')"
    done = subprocess.run([sys.executable, "-E", "-P", "-c", show], capture_output=True, text=True, check=True)
    return frozenset(map(os.path.abspath, done.stdout.split(chr(0))))


def describe_end(code: int) -> str:
    """Return a sentence on how a process with this exit code ended."""
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; where nobody did that by hand, the machine may have run out of memory" if code == -signal.SIGKILL else ""
    return f"its process was killed by {name}{hint}"


__getattr__ = leading_on(__name__, {"last_words": "whet.runtime.last_words", "printable": "whet.runtime.last_words"})
