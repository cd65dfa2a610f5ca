"""Run programs in processes of their own that start with their modules imported.

    test ── order: code, arguments, folder, variables; a line, three descriptors ──> server ── fork ──> program
    line <── process id, then exit code ─────────────────────────────────────────────┘

A program that imports torch and transformers takes seconds before it does anything. `Programs` starts one process that
imports modules, and forks it for each program. A program keeps what belongs to a process: memory, signals, output,
exit code. It does not keep the start of the interpreter: a test of imports needs a new interpreter.
"""

import array
import atexit
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from whet import installed
from whet.runtime.watchdog import die_with

_LONGEST_ORDER = 1 << 20
SHOW_STACKS = signal.SIGUSR2
"""The signal on which a program writes the stacks of its threads to its errors."""
_STACKS_SECONDS = 2.0


class Program:
    """A program that was started. It has what tests use of `subprocess.Popen`."""

    def __init__(self, line: socket.socket, words: list[str], output: IO[bytes] | None) -> None:
        self.args, self.stdout, self.returncode = words, output, None
        self._line = line
        self._reader: threading.Thread | None = None
        self._text = b""
        self.pid = int(self._said(None))

    returncode: int | None
    """The exit code, when `poll`, `wait` or `communicate` has found the program ended."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the program has ended. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            try:
                self.returncode = int(self._said(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._line.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, None]:
        """Read the output to its end, and return it when the program has ended. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if self.stdout is None:
            return None, None
        self.stdout.close()
        return self._text.decode(errors="replace").replace("\r\n", "\n"), None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, unless the program has ended."""
        self.send_signal(signal.SIGTERM)

    def _read(self) -> None:
        self._text = self.stdout.read() if self.stdout else b""

    def _said(self, seconds: float | None) -> bytes:
        self._line.settimeout(seconds)
        if not (word := self._line.recv(64)):
            raise ChildProcessError("the server of programs has ended")
        return word


class Programs:
    """Runs programs."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start the server in the background. `variables` are added to the variables of this process.

        `modules` are imported; of `module:function` the function is called, too.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "whet_testing.forking", str(theirs.fileno()), str(os.getpid()), *modules]
        environment = {**os.environ, **(variables or {})}
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def run(
        self,
        code: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
        seconds: float = 120.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as `python -c CODE ARGUMENTS` would, and return its output, errors and exit code.

        `variables` replaces all environment variables; without it the program has those of this process. The program
        has the umask of this process. Raises `subprocess.TimeoutExpired` when the program takes more than `seconds`. A
        note of this error has the program's errors, which end with the stacks of its threads.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            program = self._ask(code, arguments, folder, variables, output.fileno(), errors.fileno())
            try:
                ended = program.wait(seconds)
            except subprocess.TimeoutExpired:
                program.send_signal(SHOW_STACKS)
                with suppress(subprocess.TimeoutExpired):
                    program.wait(_STACKS_SECONDS)
                program.kill()
                program.wait()
                late = subprocess.TimeoutExpired(["python", "-c", code, *arguments], seconds, _text(output))
                late.add_note(_text(errors))
                raise late from None
            return subprocess.CompletedProcess([*arguments], ended, _text(output), _text(errors))

    def start(
        self,
        code: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Program:
        """Start a program as `run` does, and return it. Its output and its errors go to its `stdout`."""
        reader, writer = os.pipe()
        try:
            return self._ask(code, arguments, folder, variables, writer, writer, open(reader, "rb"))
        finally:
            os.close(writer)

    def _ask(
        self,
        code: str,
        arguments: Sequence[str],
        folder: Path | None,
        variables: Mapping[str, str] | None,
        output: int,
        errors: int,
        reader: IO[bytes] | None = None,
    ) -> Program:
        environment = dict(os.environ if variables is None else variables)
        order = {
            "code": code, "arguments": list(arguments), "folder": str(folder or Path.cwd()), "variables": environment,
            "umask": _umask(),
        }  # fmt: skip
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "rb") as nothing:
            files = array.array("i", [theirs.fileno(), nothing.fileno(), output, errors])
            self._socket.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        return Program(line, ["python", "-c", code, *arguments], reader)

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self._socket.close()
        self._server.wait()


def _umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")


def _serve(owner: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Return the order in the forked process, and None in the server when its owner is gone."""
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> its id, the line of its owner
    waiting = select.poll()
    waiting.register(owner, select.POLLIN)
    while True:
        for descriptor, _ in waiting.poll():
            if descriptor in running:
                pid, line = running.pop(descriptor)
                waiting.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                with line, suppress(OSError):
                    line.send(str(os.waitstatus_to_exitcode(status)).encode())
                continue
            word, files, _, _ = socket.recv_fds(owner, _LONGEST_ORDER, 4)
            if not word:
                return None
            if not (pid := os.fork()):
                for line in (owner, *(line for _, line in running.values())):
                    line.close()
                for descriptor in (files[0], *running):
                    os.close(descriptor)
                for place, file in enumerate(files[1:]):
                    os.dup2(file, place)
                    os.close(file)
                order: dict[str, Any] = json.loads(word)
                return order
            line = socket.socket(fileno=files[0])
            for file in files[1:]:
                os.close(file)
            end = os.pidfd_open(pid)
            running[end] = pid, line
            waiting.register(end, select.POLLIN)
            with suppress(OSError):
                line.send(str(pid).encode())


def main() -> None:
    """Import the modules and serve; in a forked process, run the program."""
    line = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))  # the owner's end of the line can be open in its child processes
    gc.disable()  # a quarter of the time of the imports
    for word in sys.argv[3:]:
        name, _, function = word.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    installed.entry_points(installed.GROUP)  # what is found is kept, for each program
    installed.versions()
    gc.freeze()  # pages that the collector does not write stay shared
    gc.enable()
    if (order := _serve(line)) is None:
        return
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    os.umask(order["umask"])
    faulthandler.register(SHOW_STACKS, sys.stderr)
    sys.argv = ["-c", *order["arguments"]]
    sys.path[0] = ""
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in {"", *sys.path}]
    _leave(_code_of(order["code"]))


def _code_of(program: str) -> int:
    """Run a program, and return its exit code."""
    try:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """End as Python does, but leave the memory to the kernel: to free it would first copy what the fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
