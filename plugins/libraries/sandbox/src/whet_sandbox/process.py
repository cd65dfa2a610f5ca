"""One grader process as its pool sees it: started with as few rights as possible, called over a socket pair, killed."""

import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from whet.errors import WhetError
from whet.runtime.channel import receive, send
from whet.runtime.last_words import printable
from whet.runtime.process import Child, describe_end
from whet.runtime.wire import Buffer, decode, encode

_LARGEST_ANSWER: Final = 1 << 24
_MOST_WORDS: Final = 1 << 14


class GraderProcess:
    """One grader process. Only one thread uses it, except for `kill`, which any thread may call."""

    def __init__(self, order: dict[str, Any], folder: Path, start_seconds: float) -> None:
        self._order, self._folder, self._start_seconds = order, folder, start_seconds
        self._child: Child | None = None
        self._words = b""
        self._killed = False
        self.code = 0
        """The exit code of the last process that ended."""

    @property
    def alive(self) -> bool:
        """Return whether a process was started and not ended."""
        return self._child is not None

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        environment = {
            **keep, "LANG": "C.UTF-8", "HOME": str(self._folder), "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self._words = b""
        self._child = Child(
            "whet_sandbox.grader",
            self._order["target"],
            environment=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            folder=self._folder,
        )
        if self._killed:
            self.kill()
        self.send(encode(self._order), self._start_seconds)
        answer = self.receive(self._start_seconds)
        if "ready" not in answer:
            raise WhetError(str(answer.get("raised"))[:600])

    def send(self, buffers: Sequence[Buffer], timeout_seconds: float) -> None:
        """Send a message. Raises `TimeoutError`, or `OSError` where the process is gone."""
        assert self._child is not None
        self._child.socket.settimeout(timeout_seconds)
        send(self._child.socket, buffers)

    def receive(self, timeout_seconds: float) -> Any:
        """Wait for an answer and return it. Read the stderr of the process meanwhile, because a full pipe blocks it."""
        assert self._child is not None
        assert self._child.process.stderr is not None
        deadline = time.monotonic() + timeout_seconds
        connection, words = self._child.socket, self._child.process.stderr.fileno()
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        waiting.register(words, select.POLLIN)
        while ready := waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            for descriptor, _ in ready:
                if descriptor == words:
                    self._listen(waiting, words)
            if any(descriptor != words for descriptor, _ in ready):
                answer = decode(receive(connection, _LARGEST_ANSWER, deadline), records=False, packed=False)
                return answer if type(answer) is dict else {}
        raise TimeoutError

    def end(self, patience_seconds: float = 0.0) -> str:
        """Kill the process and all that it started, and return how it ended, with its last output.

        `patience_seconds` is the time for a dying process to end by itself.
        """
        child, self._child = self._child, None
        if child is None:
            return "its process could not be started"
        child.socket.close()
        _await_end(child.pid, patience_seconds)
        child.signal()
        self.code = child.wait()
        end = describe_end(self.code)
        if (output := child.process.stderr) is not None:
            os.set_blocking(output.fileno(), False)
            self._words += output.read() or b""
            output.close()
        words = printable(self._words)
        return f"{end}\nIts last words:\n{words}" if words else end

    def _listen(self, waiting: "select.poll", words: int) -> None:
        said = os.read(words, 1 << 16)
        self._words = (self._words + said)[-_MOST_WORDS:]
        if not said:  # closed
            waiting.unregister(words)

    def kill(self) -> None:
        """Kill the process from another thread. A process that is started later is killed too."""
        self._killed = True
        child = self._child
        if child is not None:
            child.signal()


def _await_end(pid: int, patience_seconds: float) -> None:
    """Wait for a limited time until a child has ended, without taking its exit code."""
    deadline = time.monotonic() + patience_seconds
    with suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(0.002)
