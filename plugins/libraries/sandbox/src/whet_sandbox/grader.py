"""The program of a grader process: it calls one function on untrusted text, with as few rights as possible."""

import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from whet.component import resolve
from whet.errors import in_words
from whet.runtime.channel import receive, send
from whet.runtime.watchdog import die_with, leave_signals_to_driver
from whet.runtime.wire import decode, encode
from whet_sandbox.isolation import file_system, kernel, landlock, seccomp

_OPEN_FILES: Final = 64
OUT_OF_MEMORY: Final = 70
"""Exit code of a process in which a call asked for more memory than its limit."""


def main() -> None:
    """Answer calls until the driver is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    leave_signals_to_driver()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # also where the parent ignores it
    os.set_inheritable(descriptor, False)
    sys.argv = ["whet-grader", sys.argv[3]]
    connection = socket.socket(fileno=descriptor)
    try:
        order = decode(receive(connection))
        sys.path[:] = order["path"]
        _limit(order["memory_bytes"])
        try:
            function = _load(order["target"], order["setup"])
        except Exception as error:  # raised by the grader's own module
            send(connection, encode({"raised": in_words(error)}, packed=False))
            os._exit(1)
        if order["confined"]:
            confine(order["path"], os.getcwd())
        send(connection, encode({"ready": True}))
        while True:
            send(connection, _answer(function, receive(connection), order["timeout_seconds"]))
    except (EOFError, OSError):
        os._exit(0)


def confine(folders: Sequence[str], own: str) -> None:
    """Confine this process, as far as the kernel supports it, by the system call filter and Landlock of sandboxes.

    It can then read these folders, Python and the system's programs, and write into `own`; it reaches no network, and
    no process outside. Threads that run already are not confined.
    """
    readable = (*folders, sys.prefix, sys.base_prefix, *file_system.SYSTEM, "/etc", "/proc", own)
    if sys.platform != "linux":
        return
    for shut in (
        lambda: kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1),
        lambda: landlock.apply([path for path in readable if path], [own], file_system.DEVICES),
        lambda: None if seccomp.supported() else seccomp.apply(),
    ):
        with suppress(OSError):  # a kernel without it
            shut()


def _load(target: str, setup: Mapping[str, Any] | None) -> Callable[..., Any]:
    named = resolve(target)
    function: Callable[..., Any] = named if setup is None else named(**setup)
    return function


def _answer(function: Callable[..., Any], buffers: Any, cpu_seconds: float) -> Any:
    """Call the function and return its encoded answer.

    After `cpu_seconds` of processor time the kernel ends this process by SIGPROF. Time in which the processor works for
    other processes does not count.
    """
    _limit_cpu(cpu_seconds)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return encode({"value": function(*decode(buffers))}, packed=False)
    except MemoryError:  # the state of the function is unknown now
        traceback.print_exc(limit=-3)
        os._exit(OUT_OF_MEMORY)
    except RecursionError:
        return encode({"undecided": f"it recurses more than {sys.getrecursionlimit()} calls deep"})
    except Exception as error:
        return encode({"raised": f"{type(error).__name__}: {error!s:.500}"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(memory_bytes: int) -> None:
    """Limit memory and open files, and forbid writing to files, core dumps included."""
    limits = [
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ]
    for limit, wanted in limits:
        _, hard = resource.getrlimit(limit)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (wanted, wanted))


def _limit_cpu(timeout_seconds: float) -> None:
    """Set a limit at which the kernel ends a call that computes for too long, even if the call stopped the timer."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = int(used.ru_utime + used.ru_stime + timeout_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


if __name__ == "__main__":
    main()
