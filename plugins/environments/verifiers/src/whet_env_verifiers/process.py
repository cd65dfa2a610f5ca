"""The driver's handle of a process that runs verifiers. Requests and answers are lines of JSON, as in `inside.worker`.

The process runs foreign code: it may hang, die, print, or send invalid answers. Each of these is an
`InfrastructureError` that names it, for all episodes that wait for the process.
"""

import asyncio
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.errors import InfrastructureError
from whet.runtime.interpreters import surroundings
from whet.runtime.last_words import printable
from whet.runtime.process import Offspring, describe_end, new_mark
from whet.runtime.watchdog import FAMILY
from whet_env_verifiers import inside

PROGRAM = Path(inside.__file__).with_name("worker.py")
_PIPE_BYTES = 1 << 20
_MOST_WORDS = 1 << 13
_PATIENCE_SECONDS = 5.0


class Refused(Exception):  # noqa: N818 - it says what came of a request
    """The process raised an error for a request, which is the message."""


class Process(Offspring):
    """A running process. Usable from any thread, and from any event loop."""

    def __init__(self, python: str, folders: list[str], memory_bytes: int, message_bytes: int) -> None:
        """Start the process in an interpreter."""
        self.heard = time.monotonic()
        """When the process last answered, or was started."""
        self.playing = 0
        self._most, self._words, self._why = message_bytes, b"", ""
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers, self._asking, self._pinged = itertools.count(1), threading.Lock(), 0.0
        mark = new_mark()
        environment = dict(os.environ) if python == sys.executable else surroundings(python, os.environ)
        self._process = subprocess.Popen(
            [python, "-P", str(PROGRAM), json.dumps(folders), str(memory_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**environment, FAMILY: mark, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        super().__init__(self._process.pid, mark)
        assert self._process.stdin
        with suppress(OSError):  # a larger pipe helps, but is not needed
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._process.stdin.fileno(), False)  # a process that does not read must not stop the driver
        self._ended = threading.Thread(target=self._follow, daemon=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._ended.start()

    @property
    def alive(self) -> bool:
        """Return whether requests can be sent."""
        return not self._why

    def ask(self, do: str, asked: Mapping[str, Any]) -> tuple[int, "Future[Any]"]:
        """Send a request, and return its number and its answer. Raises `InfrastructureError`."""
        number, future = next(self._numbers), Future[Any]()
        with self._asking:
            if self._why:
                raise InfrastructureError(self._why)
            self._waiting[number] = future
        self._write({"id": number, "do": do, **asked})
        return number, future

    def answered(self, do: str, asked: Mapping[str, Any], seconds: float) -> Any:
        """Send a request and wait for its answer. Raises `Refused` and `InfrastructureError`."""
        _, future = self.ask(do, asked)
        try:
            return future.result(seconds)
        except TimeoutError:
            self.stop(f"did not answer {do!r} within {seconds:g} s")
            raise InfrastructureError(self._why) from None

    async def result(self, do: str, asked: Mapping[str, Any], silence: float) -> Any:
        """Send a request and wait for its answer. A process that answers nothing for `silence` seconds is ended.

        If the caller is cancelled, the request is cancelled, too. Raises `Refused` and `InfrastructureError`.
        """
        number, future = self.ask(do, asked)
        asked_at, answer = time.monotonic(), asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({answer}, timeout=silence / 4))[0]:
                quiet = time.monotonic() - max(self.heard, asked_at)  # before, there was nothing to answer
                if quiet > silence:
                    self.stop(f"answered nothing for {quiet:.0f} s, so its code blocks or hangs")
                elif time.monotonic() - self._pinged > silence / 4:
                    self._pinged = time.monotonic()
                    self.ask("ping", {})
            return answer.result()
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def stop(self, why: str = "was closed") -> None:
        """Kill the process and all that it started. All waiting requests fail with the reason `why`."""
        with self._asking:
            self._why = self._why or f"the process of verifiers {why}"
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        self.stop()
        self._ended.join(_PATIENCE_SECONDS)

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._asking:
                if not self._why and os.write(self._process.stdin.fileno(), data) == len(data):
                    return
        except BlockingIOError:
            pass
        except OSError:
            return  # the process has ended, and `_follow` fails the waiting requests
        self.stop("does not read its requests")

    def _follow(self) -> None:
        """Read answers until the process ends. Then fail the waiting requests with the reason why it ended."""
        assert self._process.stdout
        try:
            while line := self._process.stdout.readline(self._most):
                self.heard = time.monotonic()
                if not line.endswith(b"\n") and len(line) >= self._most:
                    self.stop(f"sent a message of more than {self._most} bytes")
                    break
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.stop("sent what is no answer")
        except OSError:
            pass
        self.signal(signal.SIGKILL)
        code = self.wait()
        self._listener.join(_PATIENCE_SECONDS)
        words = printable(self._words)
        with self._asking:
            self._why = self._why or f"the process of verifiers ended: {describe_end(code)}"
            self._why += f"\nIts last words:\n{words}" if words else ""
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            with suppress(InvalidStateError):
                future.set_exception(InfrastructureError(self._why))

    def _take(self, line: bytes) -> None:
        answer = json.loads(line)
        future = self._waiting.pop(answer["id"], None)
        if future is None:  # it was cancelled
            return
        with suppress(InvalidStateError):
            if "error" in answer:
                future.set_exception(Refused(str(answer["error"])))
            else:
                future.set_result(answer["ok"])

    def _listen(self) -> None:
        assert self._process.stderr
        with suppress(OSError, ValueError):
            while said := os.read(self._process.stderr.fileno(), 1 << 16):
                self._words = (self._words + said)[-_MOST_WORDS:]

    def _linger(self) -> bool:
        with suppress(ChildProcessError):  # other code has waited for the process already
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return True

    def _reap(self) -> int:
        return self._process.wait()
