"""Run programs in processes of their own that start with their modules imported.

    test ── order: code, arguments, folder, variables; three descriptors ──> server ── fork ──> program
         <── process id, then exit code ────────────────────────────────────┘

A program that imports torch and transformers takes seconds before it does anything. `Programs` starts one process that
imports modules, and forks it for each program. A program keeps what belongs to a process: memory, signals, output,
exit code. It does not keep the start of the interpreter: a test of imports needs a new interpreter.
"""

import array
import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

_LONGEST_ORDER = 1 << 20


class Programs:
    """Runs programs, one at a time."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start the server in the background. `variables` are added to the variables of this process."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "whet_testing.forking", str(theirs.fileno()), *modules]
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
        has the umask of this process. Raises `subprocess.TimeoutExpired` when the program takes more than `seconds`.
        """
        environment = dict(os.environ if variables is None else variables)
        order = {
            "code": code, "arguments": list(arguments), "folder": str(folder or Path.cwd()), "variables": environment,
            "umask": _umask(),
        }  # fmt: skip
        with open(os.devnull, "rb") as nothing, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            files = array.array("i", [file.fileno() for file in (nothing, output, errors)])
            self._socket.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
            pid = int(self._said(None))
            try:
                ended = int(self._said(seconds))
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._said(None)
                raise subprocess.TimeoutExpired(["python", "-c", code, *arguments], seconds, _text(output)) from None
            return subprocess.CompletedProcess([*arguments], ended, _text(output), _text(errors))

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self._socket.close()
        self._server.wait()

    def _said(self, seconds: float | None) -> bytes:
        self._socket.settimeout(seconds)
        if not (word := self._socket.recv(64)):
            raise ChildProcessError(f"the server of programs ended with code {self._server.wait()}")
        return word


def _umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").replace("\r\n", "\n")


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Return the order in the forked process, and None in the server when its owner is gone."""
    while True:
        word, files, _, _ = socket.recv_fds(line, _LONGEST_ORDER, 3)
        if not word:
            return None
        if not (pid := os.fork()):
            line.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            order: dict[str, Any] = json.loads(word)
            return order
        for file in files:
            os.close(file)
        line.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):
            line.send(str(os.waitstatus_to_exitcode(status)).encode())


def main() -> None:
    """Import the modules and serve; in a forked process, run the program."""
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # pages that the collector does not write stay shared
    if (order := _serve(line)) is None:
        return
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    os.umask(order["umask"])
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
