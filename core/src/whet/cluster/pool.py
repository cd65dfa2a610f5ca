"""Processes that grade untrusted text: model output can hang, crash or bloat them, and nothing else.

    pool = GraderPool(verify, timeout_seconds=5.0)  # or "my_package.grading:verify", which imports nothing here
    correct = await pool.call(answer, gold)      # from any event loop

A call that gets no answer in time costs its process, never the run: it is killed and another one is started.
"""

import asyncio
import itertools
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from whet.cluster.channel import receive, send
from whet.cluster.process import Child, describe_end, import_folders, printable
from whet.cluster.watchdog import watchdog
from whet.cluster.wire import Buffer, decode, encode
from whet.component import import_path
from whet.errors import EnvironmentError as WhetEnvironmentError
from whet.errors import InfrastructureError, WhetError

_LARGEST_ANSWER: Final = 1 << 26
_MOST_WORDS: Final = 1 << 14
_MOST_AHEAD: Final = 16
"""Calls sent to a process before it has answered."""
_MOST_AHEAD_BYTES: Final = 1 << 15  # far less than a socket holds, so that sending never waits for the process


class GraderTimeout(InfrastructureError):  # noqa: N818 - the word that callers catch
    """A grader gave no answer in time. It was killed."""


class GraderCrash(InfrastructureError):  # noqa: N818
    """A grader died, could not be started or sent no proper answer."""


class GraderRaised(WhetEnvironmentError):  # noqa: N818
    """A grader's function raised; its process lives on."""


@frozen(eq=False)
class _Job:
    buffers: Sequence[Buffer]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    bytes: int = field(init=False)

    @bytes.default
    def _size(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def finish(self, value: Any, error: WhetError | None = None) -> None:
        """Hand the outcome to the event loop that waits for it."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(_settle, self.future, value, error)


def _settle(future: "asyncio.Future[Any]", value: Any, error: WhetError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class GraderPool:
    """Calls one function in processes of its own."""

    def __init__(
        self,
        target: str | Callable[..., Any],
        workers: int = 1,
        timeout_seconds: float = 5.0,
        memory_bytes: int = 2 << 30,
        setup: Mapping[str, Any] | None = None,
        *,
        start_seconds: float = 60.0,
    ) -> None:
        """Make a pool; its processes start at the first call, or with `warm`.

        `target` is a function of a module, or its name as `module:function`; with `setup` it is instead called once
        in each process, as `target(**setup)`, and gives the function. Arguments and results are builtins.
        `timeout_seconds` is each call's deadline, and `start_seconds` that of a process importing its modules.
        """
        target = target if isinstance(target, str) else import_path(target)
        self.target, self.timeout_seconds = target, timeout_seconds
        self.timeouts = 0
        """Calls that missed their deadline."""
        self.crashes = 0
        """Calls that raised or killed their process."""
        self._order = {
            "path": import_folders(), "target": target, "setup": None if setup is None else dict(setup),
            "memory_bytes": memory_bytes, "timeout_seconds": timeout_seconds,
        }  # fmt: skip
        self._workers, self._start_seconds = workers, start_seconds
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._graders: list[_Grader] = []
        self._folder: Path | None = None
        self._closed = False

    async def call(self, *args: Any) -> Any:
        """Call the function. Raises `GraderTimeout`, `GraderCrash` or `GraderRaised`, saying which function and why."""
        loop = asyncio.get_running_loop()
        job = _Job(encode(args), loop, loop.create_future())
        with self._changed:
            self._open()
            self._jobs.append(job)
            self._changed.notify()
        return await job.future

    def warm(self) -> None:
        """Start the processes without waiting for them."""
        with self._changed:
            self._open()

    def close(self) -> None:
        """End the processes; calls under way fail. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for grader in self._graders:
            grader.kill()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._fail_waiting(WhetError(f"the graders of {self.target} are closed"))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            watchdog().release("folder", str(self._folder))
            self._folder = None

    def _open(self) -> None:
        if self._closed:
            raise WhetError(f"the graders of {self.target} are closed")
        if self._threads:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="whet-grader-"))
        watchdog().guard("folder", str(self._folder))
        self._graders = [_Grader(self._order, self._folder, self._start_seconds) for _ in range(self._workers)]
        for number, grader in enumerate(self._graders):
            # Each process is started from its own thread, which lives as long as the process may.
            thread = threading.Thread(target=self._serve, args=(grader,), name=f"whet-grader-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, grader: "_Grader") -> None:
        """Be one worker: take calls, send them, hand answers out."""
        try:
            self._prepare(grader)
            while jobs := self._take():
                error = self._prepare(grader)
                if error is None:
                    self._grade(grader, jobs)
                else:
                    self._put_back(jobs)
                    self._fail_waiting(error)
        finally:
            grader.end()

    def _prepare(self, grader: "_Grader") -> GraderCrash | None:
        """Have a living process, or say why there is none."""
        if grader.alive:
            return None
        try:
            grader.start()
        except TimeoutError:
            grader.end()
            reason = f"it was not ready within {self._start_seconds:g} s"
        except WhetError as error:
            grader.end()
            reason = str(error)
        except (EOFError, OSError) as error:
            reason = grader.end(patience_seconds=1.0) if grader.alive else str(error)
        else:
            return None
        return GraderCrash(f"the grader {self.target} could not be started: {reason}")

    def _take(self) -> list[_Job]:
        """Wait for calls and take this worker's share; none when the pool is closed."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            share = min(-(-len(self._jobs) // self._workers), _MOST_AHEAD)
            sizes = itertools.accumulate(job.bytes for job in itertools.islice(self._jobs, share))
            count = max(1, sum(size <= _MOST_AHEAD_BYTES for size in sizes))
            return [self._jobs.popleft() for _ in range(count)]

    def _put_back(self, jobs: list[_Job]) -> None:
        with self._changed:
            self._jobs.extendleft(reversed(jobs))
            self._changed.notify()

    def _grade(self, grader: "_Grader", jobs: list[_Job]) -> None:
        """Send calls and take their answers, each under its own deadline."""
        waiting = deque(job for job in jobs if not job.future.cancelled())
        try:
            # One that dies meanwhile may have answered some calls before: those answers are read below.
            with suppress(BrokenPipeError, ConnectionResetError):
                for job in waiting:
                    grader.send(job.buffers, self.timeout_seconds)
            while waiting:
                answer = grader.receive(self.timeout_seconds)
                self._hand_out(waiting.popleft(), answer)
        except TimeoutError:
            grader.end()
            self.timeouts += 1
            late = f"the grader {self.target} gave no answer within {self.timeout_seconds:g} s"
            waiting.popleft().finish(None, GraderTimeout(late))
        except (EOFError, OSError):
            cause = grader.end(patience_seconds=1.0)
            self._crash(waiting.popleft(), "the pool was closed" if self._closed else cause)
        except WhetError as error:
            grader.end()
            self._crash(waiting.popleft(), f"it sent no proper answer: {error}")
        if waiting:
            self._put_back(list(waiting))

    def _hand_out(self, job: _Job, answer: Any) -> None:
        if "value" in answer:
            job.finish(answer["value"])
        else:
            self._crash(job, str(answer.get("raised"))[:600], GraderRaised)

    def _crash(self, job: _Job, cause: str, kind: type[GraderCrash] | type[GraderRaised] = GraderCrash) -> None:
        self.crashes += 1
        job.finish(None, kind(f"the grader {self.target} failed: {cause}"))

    def _fail_waiting(self, error: WhetError) -> None:
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            job.finish(None, error)


class _Grader:
    """One grader process; used by one thread, but for `kill`."""

    def __init__(self, order: dict[str, Any], folder: Path, start_seconds: float) -> None:
        self._order, self._folder, self._start_seconds = order, folder, start_seconds
        self._child: Child | None = None
        self._words = b""
        self._killed = False

    @property
    def alive(self) -> bool:
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
            "whet.cluster.grader",
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
        assert self._child is not None
        self._child.socket.settimeout(timeout_seconds)
        send(self._child.socket, buffers)

    def receive(self, timeout_seconds: float) -> Any:
        """Wait for an answer, reading along what the process says on stderr: a full pipe would stop it."""
        assert self._child is not None
        assert self._child.stderr is not None
        deadline = time.monotonic() + timeout_seconds
        connection, words = self._child.socket, self._child.stderr.fileno()
        waiting = select.poll()
        waiting.register(connection, select.POLLIN)
        waiting.register(words, select.POLLIN)
        while ready := waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            for descriptor, _ in ready:
                if descriptor == words:
                    self._listen(waiting, words)
            if any(descriptor != words for descriptor, _ in ready):
                answer = decode(receive(connection, _LARGEST_ANSWER, deadline), records=False)
                return answer if type(answer) is dict else {}
        raise TimeoutError

    def end(self, patience_seconds: float = 0.0) -> str:
        """Kill the process with all it started, and say how it ended; a dying one has a moment to end by itself."""
        child, self._child = self._child, None
        if child is None:
            return "its process could not be started"
        child.socket.close()
        child.ended(patience_seconds)
        child.signal()
        end = describe_end(child.wait())
        if child.stderr is not None:
            os.set_blocking(child.stderr.fileno(), False)
            self._words += child.stderr.read() or b""
            child.stderr.close()
        words = printable(self._words)
        return f"{end}\nIts last words:\n{words}" if words else end

    def _listen(self, waiting: "select.poll", words: int) -> None:
        said = os.read(words, 1 << 16)
        self._words = (self._words + said)[-_MOST_WORDS:]
        if not said:  # closed
            waiting.unregister(words)

    def kill(self) -> None:
        """End it from another thread, for good."""
        self._killed = True
        child = self._child
        if child is not None:
            child.signal()
