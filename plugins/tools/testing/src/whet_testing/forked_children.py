"""Start worker processes and fork servers as forks of a process that has imported torch already.

A worker process imports torch and transformers, which takes seconds. A process of the tests has them. Inside
`forked_children`, this process forks itself where a run would start `python -m whet.runtime.worker_process`. The child
has its own session, its own variables, only the descriptors that were meant for it, and it dies with the thread that
started it, as a started program does. It does not keep the start of the interpreter: a test of imports, of another
interpreter or of variables that libraries read at import does not use it.
"""

import atexit
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any, NoReturn
from unittest import mock

from whet_testing import warm

PROGRAMS = ("whet.runtime.worker_process", "whet.runtime.forkserver")
_NEW_SEED = 67280421310721
"""The seed of torch's generator in a process that has just imported torch."""


@contextmanager
def forked_children() -> Iterator[None]:
    """Fork the processes that a run of this process starts, where that is possible, and start the others."""
    process = import_module("whet.runtime.process")
    ours = types.SimpleNamespace(**vars(subprocess))
    ours.Popen = _popen
    with mock.patch.object(process, "subprocess", ours):
        yield


def _popen(command: Sequence[str], **settings: Any) -> Any:
    """Return a forked process for a program of workers, and a started one for any other program."""
    python, module = command[0], command[3] if command[1:3] == ["-P", "-m"] else ""
    if python == sys.executable and module in PROGRAMS and _may_fork():
        if "transformers.modeling_utils" in sys.modules:
            warm.tables()
        return ForkedChild(module, list(command[4:]), **settings)
    return subprocess.Popen(command, **settings)


def _may_fork() -> bool:
    """Return whether a fork saves an import and copies no thread of a library that would be missed."""
    torch = sys.modules.get("torch")
    if torch is not None and (torch.get_num_threads() != 1 or torch.cuda.is_available()):
        return False
    ray = sys.modules.get("ray")
    return ray is None or not ray.is_initialized()


class ForkedChild:
    """A fork of this process that runs a module's `main`. Has what `whet.runtime.process` needs of `Popen`."""

    stdout = stderr = None

    def __init__(
        self,
        module: str,
        arguments: list[str],
        *,
        pass_fds: Sequence[int],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        env: Mapping[str, str],
        cwd: Any = None,
        stdin: int,
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        assert stdin == subprocess.DEVNULL
        for stream in (sys.stdout, sys.stderr):  # else the child would write what they hold a second time
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        outputs = [end if isinstance(end, int) else end.fileno() for end in (stdout, stderr)]
        self._code: int | None = None
        if not (pid := os.fork()):
            _become(module, arguments, list(pass_fds), outputs, env, cwd)
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code of the process when it has ended."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _become(
    module: str, arguments: list[str], kept: list[int], outputs: list[int], variables: Mapping[str, str], folder: Any
) -> NoReturn:
    """Run the program in the new process as if it had been started, and end."""
    code = 1
    try:
        _end_imports()
        atexit.register(_leave)  # so what the parent registered, such as to remove its temporary folders, does not run
        os.setsid()
        gc.freeze()  # an object of before that were freed would close a descriptor of now
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        _keep(kept, outputs)
        os.environ.clear()
        os.environ.update(variables)
        if folder is not None:
            os.chdir(folder)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(end, mode, 1) for end, mode in enumerate("rww"))
        sys.argv = [module, *arguments]
        sys.orig_argv = ["python", "-m", module, *arguments]
        import_module("whet.runtime.forkserver").show_command(sys.orig_argv, arguments[-1])
        _forget()
        import_module(module).main()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _leave() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def _end_imports() -> None:
    """Drop the imports that other threads have begun. Their locks would stay locked and their modules incomplete."""
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]
    bootstrap: Any = importlib._bootstrap
    bootstrap._module_locks.clear()
    bootstrap._blocking_on.clear()


def _keep(kept: list[int], outputs: list[int]) -> None:
    """Close every descriptor but those that are kept. Their numbers go to the null device, so that nothing gets one."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    copies = [os.dup(end) for end in outputs]
    for target, copy in zip((1, 2), copies, strict=True):
        os.dup2(copy, target)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in (*kept, null):
            with suppress(OSError):
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _forget() -> None:
    """Set back what this process had and a new one has not."""
    vars(import_module("whet.runtime.worker_process")).update(_compute=None, _hosting=False)
    import_module("whet.runtime.watchdog")._watchdogs.clear()
    logging.getLogger().handlers.clear()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(_NEW_SEED)
