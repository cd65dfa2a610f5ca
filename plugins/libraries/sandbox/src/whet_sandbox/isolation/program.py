"""A program of a sandbox: the process that becomes it, behind the last walls, and the supervisor's side."""

import os
import resource
import signal
from contextlib import suppress
from typing import Any, Final, NoReturn

from whet_sandbox.isolation import file_system, kernel, landlock, seccomp

CHUNK: Final = 1 << 16
ANSWER_IN, ANSWER_OUT = 3, 4
"""The descriptors of a program that answers: it reads questions from the one and writes answers to the other."""


class Program:
    """A program under way, with the supervisor's ends of its pipes."""

    def __init__(self, pid: int, limits: dict[str, Any], pipes: dict[str, int], stdin: bytes) -> None:
        self.pid, self.limits, self.pipes, self.feed = pid, limits, pipes, {"stdin": stdin, "questions": b""}
        self.ended = os.pidfd_open(pid)
        self.stdout, self.stderr, self.answers = bytearray(), bytearray(), bytearray()
        self.written = 0
        self.why, self.exit = "", 0
        if not stdin:
            self.shut("stdin")

    def shut(self, name: str) -> None:
        """Close one of the pipes."""
        if name in self.pipes:
            os.close(self.pipes.pop(name))

    def take(self, name: str) -> bool:
        """Read what there is in a pipe. Return whether there may be more."""
        try:
            data = os.read(self.pipes[name], CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.shut(name)
            return False
        if name == "answers":
            self.answers += data
            if len(self.answers) > self.limits["answer_bytes"]:
                self.stop("answer")
            return True
        room = self.limits["output_bytes"] - self.written
        kept = data[: max(0, room)]
        self.written += len(kept)
        (self.stdout if name == "stdout" else self.stderr).extend(kept)
        if len(data) > room:
            self.stop("output")
        return bool(len(data) <= room)

    def give(self, name: str) -> None:
        """Write the data that waits for a pipe, as much as the pipe takes."""
        try:
            count = os.write(self.pipes[name], self.feed[name][:CHUNK])
            self.feed[name] = self.feed[name][count:]
        except BlockingIOError:
            return
        except OSError:  # the program has closed its end
            self.feed[name] = b""
        if name == "stdin" and not self.feed[name]:
            self.shut(name)

    def stop(self, why: str) -> None:
        """Kill the program for a reason, unless there is one already."""
        if not self.why:
            self.why = why
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def reap(self) -> None:
        """Take the exit code of the ended program."""
        _, status, usage = os.wait4(self.pid, 0)
        self.exit = os.waitstatus_to_exitcode(status)
        used = usage.ru_utime + usage.ru_stime
        if not self.why:
            late = self.exit == -signal.SIGXCPU or (
                self.exit == -signal.SIGKILL and used >= self.limits["cpu_seconds"] - 0.1
            )
            self.why = "cpu" if late else "exit" if self.exit >= 0 else "signal"
        os.close(self.ended)


def become(header: dict[str, Any], theirs: dict[str, int], failing: int, machine_proc: int) -> NoReturn:
    """Execute the program in this process. An error is written to the pipe `failing`, and nothing runs."""
    what = "its descriptors"
    try:
        limits = header["limits"]
        os.setsid()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else the file below belongs to root
        with suppress(OSError):  # if the machine's memory runs out, the kernel kills a program first
            opened = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=machine_proc)
            os.write(opened, b"1000")
            os.close(opened)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        moved = [os.dup2(descriptor, 100 + at) for at, descriptor in enumerate(theirs.values())]
        placed = {"stdin": 0, "stdout": 1, "stderr": 2, "questions": ANSWER_IN, "answers": ANSWER_OUT}
        highest = 2
        failing = os.dup2(failing, 99, inheritable=False)
        for name, descriptor in zip(theirs, moved, strict=True):
            os.dup2(descriptor, placed[name])
            highest = max(highest, placed[name])
        os.closerange(highest + 1, failing)
        os.closerange(failing + 1, 1 << 20)
        what = "its limits"
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(5)
        _set_limits(limits)
        os.chdir(file_system.BOX)
        what = "the wall by Landlock"
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        landlock.apply(["/"], list(file_system.WRITABLE), file_system.DEVICES)
        what = "the filter of system calls"
        seccomp.apply()
        what = header["argv"][0]
        os.execve(header["argv"][0], header["argv"], header["environment"])
    except BaseException as error:
        os.write(failing, f"{what}: {type(error).__name__}: {error}".encode())
    os._exit(127)


def _set_limits(limits: dict[str, Any]) -> None:
    cpu = max(1, -(-int(limits["cpu_seconds"] * 1000) // 1000))
    for name, soft, hard in (
        ("CPU", cpu, cpu + 1),
        ("AS", limits["memory_bytes"], limits["memory_bytes"]),
        ("FSIZE", limits["disk_bytes"], limits["disk_bytes"]),
        ("NOFILE", limits["open_files"], limits["open_files"]),
        ("NPROC", limits["processes"], limits["processes"]),
        ("CORE", 1, 1),  # see `seccomp`
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
        ("SIGPENDING", 64, 64),
        ("STACK", 8 << 20, 8 << 20),
    ):
        number = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(number)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(number, (soft, hard))
