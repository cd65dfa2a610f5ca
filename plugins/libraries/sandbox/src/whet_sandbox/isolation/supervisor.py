"""The supervisor of one sandbox: it starts programs, watches their limits, and sends their results to the driver.

It trusts only the driver. It reads a program's output only from pipes and plain files, up to limits.

A program ends in one of these ways, `why`:

    exit      it ended by itself; `exit` is its code
    signal    a signal ended it; `exit` is minus the signal's number
    cpu       it used more processor time than `cpu_seconds`, with all that it started
    wall      it ran, or did not answer, for longer than `wall_seconds`
    memory    it and all that it started used more than `memory_bytes`
    output    it wrote more than `output_bytes` to stdout and stderr
    answer    it wrote an answer longer than `answer_bytes`
    spoiled   an earlier program of the session left the sandbox so that this one cannot be started
    stopped   the driver stopped it

Any other failure is a failure of the sandbox, and is sent as the message `broken`.
"""

import os
import select
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, Protocol

from whet_sandbox.isolation import frames, kernel, landlock
from whet_sandbox.isolation.file_system import BOX
from whet_sandbox.isolation.namespaces import FirstProcess, Refused
from whet_sandbox.isolation.program import CHUNK, Program, become

_POLL_SECONDS: Final = 0.05
_COUNTED: Final = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"VmPTE:", b"HugetlbPages:")
"""The fields that count as a process's memory. Pages of files do not count: the disk has its own limit."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Stream(Protocol):
    """The connection of a supervisor and the driver: a socket, or an object with these methods of a socket."""

    def fileno(self) -> int: ...  # noqa: D102
    def recv(self, size: int, /) -> bytes: ...  # noqa: D102
    def sendall(self, data: bytes, /) -> None: ...  # noqa: D102


class Supervisor:
    """Serves one driver over one socket, for one program at a time, until the driver closes it."""

    def __init__(self, control: Stream, machine_proc: int, first: FirstProcess | None) -> None:
        """Take the driver's stream, a descriptor of the machine's `/proc`, and process 1. None: this is process 1."""
        self._control, self._proc, self._first = control, machine_proc, first
        self._program: Program | None = None
        self._used = False
        """Whether a program has run here. A program may cause later failures. They must not look like failures of the
        sandbox: otherwise a program could choose that its episode does not count."""

    def serve(self) -> None:
        """Serve the driver's requests, one after another, until the driver closes the socket."""
        doing: dict[str, Callable[[dict[str, Any], list[bytes]], bytes]] = {
            "run": self._run, "start": self._start, "ask": self._ask, "stop": self._stop
        }  # fmt: skip
        if self._first is not None and self._first.pid not in self._inside():
            raise Refused("the memory of programs cannot be watched: /proc does not show the children of a process")
        self._send(frames.pack({"is": "ready", "landlock": landlock.version()}))
        while (request := self._receive()) is not None:
            header, blobs = request
            try:
                answer = doing[header["do"]](header, blobs)
            except Refused as error:
                answer = frames.pack({"is": "broken", "reason": str(error)})
            self._send(answer)

    # requests of the driver

    def _run(self, header: dict[str, Any], blobs: list[bytes]) -> bytes:
        """Run a program until it ends."""
        refused = self._begin(header, blobs)
        if refused:
            return refused
        self._watch(header["limits"]["wall_seconds"], lambda: False)
        return self._result(header["collect"], last=header["last"])

    def _start(self, header: dict[str, Any], blobs: list[bytes]) -> bytes:
        """Start a program that answers questions."""
        return self._begin(header, blobs, answering=True) or frames.pack({"is": "started"})

    def _ask(self, header: dict[str, Any], blobs: list[bytes]) -> bytes:
        """Pass a line on to the program, and return the line that it answers."""
        program = self._program
        if program is None:
            raise Refused("no program is running that could answer")
        program.answers.clear()
        program.feed["questions"] = blobs[0] + b"\n"
        self._watch(header["wall_seconds"], lambda: b"\n" in program.answers)
        if b"\n" not in program.answers or program.why:
            return self._result(header["collect"], last=header["last"])
        for name in ("stdout", "stderr"):
            while name in program.pipes and program.take(name):
                pass
        line = bytes(program.answers).partition(b"\n")[0]
        said = [line, bytes(program.stdout), bytes(program.stderr)]
        program.stdout.clear()
        program.stderr.clear()
        program.written = 0
        return frames.pack({"is": "answer"}, said)

    def _stop(self, header: dict[str, Any], blobs: list[bytes]) -> bytes:
        """End the program."""
        if self._program is None:
            raise Refused("no program is running that could be stopped")
        self._program.stop("stopped")
        return self._result(header["collect"], last=header["last"])

    def _begin(self, header: dict[str, Any], blobs: list[bytes], answering: bool = False) -> bytes:
        """Write the program's files and start it. Returns a result if an earlier program prevents the start."""
        if self._program is not None:
            raise Refused("a program is running already")
        stdin, *contents = blobs
        try:
            for path, content in zip(header["files"], contents, strict=True):
                _write_file(path, content)
            self._program = self._spawn(header, stdin, answering)
        except (OSError, Refused) as error:
            if not self._used:
                raise Refused(f"the program cannot be started: {error}") from error
            text = f"an earlier program left the sandbox unusable: {error}".encode()
            return frames.pack({"is": "result", "exit": 1, "why": "spoiled", "files": []}, [b"", text])
        self._used = True
        return b""

    def _spawn(self, header: dict[str, Any], stdin: bytes, answering: bool) -> Program:
        inward = ("stdin", "questions") if answering else ("stdin",)
        outward = ("stdout", "stderr", "answers") if answering else ("stdout", "stderr")
        ours, theirs = dict[str, int](), dict[str, int]()
        for name in inward:
            theirs[name], ours[name] = os.pipe2(os.O_CLOEXEC)
        for name in outward:
            ours[name], theirs[name] = os.pipe2(os.O_CLOEXEC)
        failed, failing = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            become(header, theirs, failing, self._proc)
        os.close(failing)
        for descriptor in theirs.values():
            os.close(descriptor)
        with open(failed, "rb") as file:
            error = file.read(4096).decode("utf-8", "replace")
        if error:
            os.waitpid(pid, 0)
            for descriptor in ours.values():
                os.close(descriptor)
            raise Refused(error)
        for descriptor in ours.values():
            os.set_blocking(descriptor, False)
        return Program(pid, header["limits"], ours, stdin)

    # watching

    def _watch(self, seconds: float, done: Callable[[], bool]) -> None:
        """Carry data between pipes until the program has ended, `done()` is true, or a limit is passed."""
        program = self._program
        assert program is not None
        now = time.monotonic()
        deadline, look = now + seconds, now + _POLL_SECONDS
        while not done():
            if program.ended in self._carry(program, min(deadline, look) - time.monotonic()):
                return
            now = time.monotonic()
            if now >= deadline:
                program.stop("wall")
            if now >= look:
                self._look(program)
                look = time.monotonic() + _POLL_SECONDS

    def _carry(self, program: Program, seconds: float) -> set[int]:
        """Wait for one event and serve the pipes that are ready. Return the descriptors that were ready."""
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(program.ended, select.POLLIN)
        names = dict[int, str]()
        for name, descriptor in program.pipes.items():
            reads = name in ("stdout", "stderr", "answers")
            if reads or program.feed[name]:
                waiting.register(descriptor, select.POLLIN if reads else select.POLLOUT)
                names[descriptor] = name
        ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, seconds) * 1000)}
        if self._control.fileno() in ready:  # the driver sends nothing now, so it is gone
            self.close()
        for descriptor in ready & set(names):
            name = names[descriptor]
            if name in program.feed:
                program.give(name)
            else:
                program.take(name)
        return ready

    def _look(self, program: Program) -> None:
        """Compare memory and processor time of all processes of the sandbox with the limits."""
        memory, ticks = 0, 0
        for pid in self._inside():
            with suppress(OSError, ValueError, IndexError):
                memory += _own_memory(self._read(f"{pid}/status"))
                fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
                ticks += sum(int(value) for value in fields[11:15])  # own and reaped children's
        if memory > program.limits["memory_bytes"]:
            program.stop("memory")
        elif ticks > program.limits["cpu_seconds"] * _TICKS:
            program.stop("cpu")

    def _inside(self) -> list[int]:
        """Return the processes of the sandbox: all that descend from this process."""
        found, new = list[int](), [int(os.readlink("self", dir_fd=self._proc))]
        while new:
            found.append(pid := new.pop())
            with suppress(OSError):
                tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
                try:
                    for thread in os.listdir(tasks):
                        new += self._numbers(f"{pid}/task/{thread}/children")
                finally:
                    os.close(tasks)
        return found[1:]

    def _read(self, path: str) -> bytes:
        opened = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(opened, 1 << 16)
        finally:
            os.close(opened)

    def _numbers(self, path: str) -> list[int]:
        return [int(word) for word in self._read(path).split()]

    # results

    def _result(self, collect: Sequence[str], last: bool) -> bytes:
        """End everything that runs in the sandbox, and return the result of the program. `last`: end the sandbox."""
        program, self._program = self._program, None
        assert program is not None
        if not program.why and not _has_ended(program):
            program.stop("stopped")
        program.reap()
        if self._first is None:
            _sweep_as_first()
        elif last:
            self._first.end()
        else:
            self._first.sweep()
        for name in ("stdout", "stderr"):
            while name in program.pipes and program.take(name):
                pass
        for name in list(program.pipes):
            program.shut(name)
        found, blobs, room = list[str](), [bytes(program.stdout), bytes(program.stderr)], program.limits["file_bytes"]
        for path in collect:
            content = _read_file(path, room)
            if content is not None:
                found.append(path)
                blobs.append(content)
                room -= len(content)
        return frames.pack({"is": "result", "exit": program.exit, "why": program.why, "files": found}, blobs)

    def close(self) -> NoReturn:
        """End the sandbox and this process."""
        if self._first is not None:
            with suppress(ProcessLookupError, ChildProcessError):
                self._first.end()
        os._exit(0)

    def _send(self, message: bytes) -> None:
        try:
            self._control.sendall(message)
        except OSError:
            self.close()

    def _receive(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """Wait for a request, and watch the limits of a started program meanwhile. None: the driver is gone."""
        while (program := self._program) is not None and not program.why:
            ready = select.select([self._control.fileno(), program.ended], [], [], _POLL_SECONDS)[0]
            if ready:
                break
            self._look(program)
        try:
            header, blobs = frames.sizes(self._exactly(frames.PREFIX.size))
            return frames.unpack(self._exactly(header), self._exactly(blobs))
        except (OSError, EOFError):
            return None

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._control.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _own_memory(status: bytes) -> int:
    """Return the bytes of memory in the text of `/proc/PID/status`."""
    lines = (line.split() for line in status.splitlines() if line.startswith(_COUNTED))
    return sum(int(words[1]) << 10 for words in lines)


def _has_ended(program: Program) -> bool:
    return bool(select.select([program.ended], [], [], 0)[0])


def _sweep_as_first() -> None:
    """Kill and reap all other processes, as process 1 of a container."""
    assert os.getpid() == 1, "this would kill all processes of the user"
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.0005)
        except ChildProcessError:
            return


def _write_file(path: str, content: bytes) -> None:
    """Write a file of the sandbox's folder, in place of what is there."""
    box = os.open(BOX, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, name = path.split("/")
        folder = box
        for at in range(len(parents)):
            above = "/".join(parents[: at + 1])
            with suppress(FileExistsError):
                os.mkdir(parents[at], 0o755, dir_fd=folder)
            following = kernel.open_beneath(box, above, os.O_RDONLY | os.O_DIRECTORY)
            if folder != box:
                os.close(folder)
            folder = following
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o644, dir_fd=folder), "wb") as file:
            file.write(content)
        if folder != box:
            os.close(folder)
    finally:
        os.close(box)


def _read_file(path: str, most: int) -> bytes | None:
    """Return the content of a plain file of the sandbox's folder. None: there is none, or it is too large."""
    try:
        box = os.open(BOX, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            opened = kernel.open_beneath(box, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        finally:
            os.close(box)
        with open(opened, "rb", buffering=0) as file:
            facts = os.fstat(opened)
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_size > most:
                return None
            content = bytearray()
            while len(content) <= most and (part := file.read(CHUNK)):
                content += part
    except OSError:
        return None
    return bytes(content) if len(content) <= most else None
