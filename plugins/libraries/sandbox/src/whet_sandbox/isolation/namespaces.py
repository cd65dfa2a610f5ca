"""Put this process outside, and its children inside, new namespaces with a private root.

    supervisor          new user, mount, network, IPC, host name and cgroup namespaces; the machine's process namespace
      |- first process  process 1 of a new process namespace: it waits, and kills all others when it is told to; no more
      `- program        a later process of that namespace

No number that a program can name is the supervisor's. When process 1 has been reaped, the kernel has ended every other
process of the namespace.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from whet_sandbox.isolation import file_system, kernel

_UNPRIVILEGED: Final = 64_534
"""The user that programs of root are. No system gives this number to a user."""
_INSIDE: Final = 1000
_SWEEP_SECONDS: Final = 10.0


class Refused(Exception):  # noqa: N818 - it says what happened
    """A wall could not be built. The message names it."""


class FirstProcess:
    """Process 1 of the sandbox's process namespace, as the supervisor sees it."""

    def __init__(self) -> None:
        orders, self._orders = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _be_first(orders, answers)
            finally:
                os._exit(1)
        os.close(orders)
        os.close(answers)
        self._expect(b"1", "start")

    def mount_proc(self, folder: str) -> None:
        """Mount the `/proc` of the namespace in a folder. Afterwards process 1 has no capabilities."""
        os.write(self._orders, f"m{folder}".encode())
        self._expect(b"m", "mount its /proc")

    def sweep(self) -> None:
        """Kill all other processes of the namespace, and wait until they are gone."""
        os.write(self._orders, b"k")
        deadline = time.monotonic() + _SWEEP_SECONDS
        while not select.select([self._answers], [], [], 0.01)[0] and time.monotonic() < deadline:
            self._reap()  # what waits for this process to be reaped is not gone
        self._expect(b"k", "end the other processes")

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self.pid:
                    raise Refused("process 1 of the sandbox has ended")
                os.waitpid(ended.si_pid, 0)

    def end(self) -> None:
        """End the namespace with all its processes. A second call does nothing.

        Process 1 ends when all others have been reaped. The supervisor's own children wait for the supervisor.
        """
        pid, self.pid = self.pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, 0)[0] != pid:
                pass

    def _expect(self, answer: bytes, what: str) -> None:
        ready = select.select([self._answers], [], [], _SWEEP_SECONDS)[0]
        if not ready or os.read(self._answers, 1) != answer:
            raise Refused(f"process 1 of the sandbox did not {what}")


def _be_first(orders: int, answers: int) -> None:
    if os.getpid() != 1:
        raise Refused("the first process is not process 1")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)  # SIGCHLD, too: the kernel then reaps orphans by itself
    keep = sorted((orders, answers))
    for low, high in zip((-1, *keep), (*keep, 1 << 20), strict=True):
        os.closerange(low + 1, high)
    os.write(answers, b"1")
    while order := os.read(orders, 256):
        if order.startswith(b"m"):
            file_system.mount_proc(order[1:].decode())
            kernel.drop_capabilities()
        else:
            _kill_others()
        os.write(answers, order[:1])


def _kill_others() -> None:
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
        while True:  # until the kernel and the supervisor have reaped them all
            os.kill(-1, 0)
            select.select([], [], [], 0.0005)


def become_unprivileged() -> None:
    """Stop being root: no limit on processes binds root."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(_UNPRIVILEGED, _UNPRIVILEGED, _UNPRIVILEGED)
        os.setresuid(_UNPRIVILEGED, _UNPRIVILEGED, _UNPRIVILEGED)
    except OSError as error:
        if _is_real_root():
            raise Refused(f"root cannot become user {_UNPRIVILEGED}: {error}") from error


def _is_real_root() -> bool:
    """Return whether user 0 here is user 0 of the machine, and not of a user namespace."""
    with open("/proc/self/uid_map") as file:
        return any(line.split()[:2] == ["0", "0"] for line in file)


def enter(settings: dict[str, Any]) -> FirstProcess:
    """Build all walls around the later children of this process. Raises `Refused` with the wall that fails."""
    folders: Sequence[str] = settings["folders"]
    what = "copying the mounts that programs see"
    try:
        try:
            trees, links = file_system.views(folders)
        except PermissionError:
            trees, links = {}, {}
        what = "giving up root"
        become_unprivileged()
        os.umask(0o022)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else the maps of identities are root's
        uid, gid = os.geteuid(), os.getegid()
        for name, flag in kernel.NEW_NAMESPACES.items():
            what = f"a new {name} namespace"
            kernel.unshare(flag)
            if name == "user":
                what = "the map of user numbers"
                _write("/proc/self/setgroups", "deny")
                _write("/proc/self/uid_map", f"{_INSIDE} {uid} 1")
                _write("/proc/self/gid_map", f"{_INSIDE} {gid} 1")
        what = "process 1"
        first = FirstProcess()
        what = "the private root"
        if not trees:
            trees, links = file_system.views(folders)
        file_system.build(trees, links, settings, first.mount_proc)
        what = "the host name"
        socket.sethostname("sandbox")
        what = "giving up capabilities"
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    except OSError as error:
        raise Refused(f"{what} failed: {error}") from error
    return first


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
