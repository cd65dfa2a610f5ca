"""Processes that grade untrusted text. Model output can hang, crash or bloat these processes, and nothing else.

    pool = GraderPool(verify, timeout_seconds=5.0)  # or "my_package.grading:verify", which imports nothing here
    correct = await pool.call(answer, gold)      # from any event loop

How a call can fail, and where the fault is:

    it uses more processor time than `timeout_seconds`, or             Undecided: the text
    its recursion is too deep
    no answer for ten times as long, more memory than the limit,       a second try, alone in a new process;
    the process dies by itself, the answer is too large or damaged     if that fails too: Undecided
    the process cannot be started, or is killed from outside, or       GraderCrash: the infrastructure
    the driver itself has an error
    the function raises                                                GraderRaised: the function

The limit is on processor time, because a busy machine makes a call slow but does not change its processor time. A call
that ends its process does not end the run: the pool starts another process.
"""

import asyncio
import itertools
import logging
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from whet.component import import_path
from whet.errors import EpisodeError, InfrastructureError, Undecided, WhetError, in_words
from whet.interfaces.undecided import note
from whet.runtime.process import import_folders
from whet.runtime.threads import watched
from whet.runtime.watchdog import watchdog
from whet.runtime.wire import Buffer, encode
from whet_sandbox.grader import OUT_OF_MEMORY
from whet_sandbox.process import GraderProcess

logger = logging.getLogger(__name__)

_MOST_AHEAD: Final = 16
"""Calls that may be sent to a process before it has answered the first of them."""
_MOST_AHEAD_BYTES: Final = 1 << 15  # far below a socket's buffer, so that sending never waits
_PATIENCE: Final = 10
"""The wall-clock limit of a call as a multiple of its limit of processor time, because the machine may be busy."""


class GraderCrash(InfrastructureError):  # noqa: N818 - the name that callers catch
    """A grader process could not be started, was killed from outside, or could not be called."""


class GraderRaised(EpisodeError):  # noqa: N818
    """The function of a grader raised an error. The process continues."""


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
        """Pass the result or the error to the event loop that waits for it."""
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
    """Calls one function in separate processes."""

    def __init__(
        self,
        target: str | Callable[..., Any],
        workers: int = 1,
        timeout_seconds: float = 5.0,
        memory_bytes: int = 2 << 30,
        setup: Mapping[str, Any] | None = None,
        *,
        start_seconds: float = 60.0,
        confined: bool = True,
    ) -> None:
        """Make a pool. Its processes start at the first call, or with `warm`.

        `target` is a function of a module, or its name as `module:function`. With `setup`, `target(**setup)` is called
        once in each process and returns the function. Arguments and results are builtins. `timeout_seconds` limits the
        processor time of a call, `memory_bytes` the address space of a process, and `start_seconds` the time in which
        a process imports its modules. Once the function is made, the process is confined as far as the kernel
        supports it: it can read only the folders of its imports and of the system, and it reaches no network. Use
        `confined=False` for a function that needs more.
        """
        target = target if isinstance(target, str) else import_path(target)
        self.target, self.timeout_seconds = target, timeout_seconds
        self.undecided = 0
        """Calls that raised `Undecided`."""
        self.crashes = 0
        """Calls that raised `GraderCrash` or `GraderRaised`."""
        self._order: dict[str, Any] = {
            "path": import_folders(), "target": target, "setup": None if setup is None else dict(setup),
            "memory_bytes": memory_bytes, "timeout_seconds": timeout_seconds, "confined": confined,
        }  # fmt: skip
        self._workers, self._start_seconds = workers, start_seconds
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._graders: list[GraderProcess] = []
        self._folder: Path | None = None
        self._closed = False
        self._lost: GraderCrash | None = None
        """The error of every further call, once a thread of the pool has ended unexpectedly."""

    async def call(self, *args: Any) -> Any:
        """Call the function and return its result.

        Raises `Undecided`, `GraderCrash` or `GraderRaised`, which name the function and the cause. `Undecided` is also
        recorded for the current episode; see `whet.interfaces.undecided`.
        """
        loop = asyncio.get_running_loop()
        job = _Job(encode(args), loop, loop.create_future())
        with self._changed:
            self._open()
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await job.future
        except Undecided as error:
            note(str(error).partition("\n")[0])
            raise

    def warm(self) -> None:
        """Start the processes without waiting for them."""
        with self._changed:
            self._open()

    def close(self) -> None:
        """End the processes, and fail the calls under way. Safe to call twice."""
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
        if self._lost is not None:
            raise self._lost
        if self._threads:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="whet-grader-"))
        watchdog().guard("folder", str(self._folder))
        self._graders = [GraderProcess(self._order, self._folder, self._start_seconds) for _ in range(self._workers)]
        for number, grader in enumerate(self._graders):
            # Each process has its own thread, which starts it, because the kernel kills it when that thread ends.
            serve = partial(self._serve, grader)
            self._threads.append(watched(f"whet-grader-{number}", serve, self._lose, over=lambda: self._closed))

    def _serve(self, grader: GraderProcess) -> None:
        """Take calls, send them to one process, and pass on its answers, until the pool is closed."""
        jobs: list[_Job] = []
        try:
            self._prepare(grader)
            while jobs := self._take():
                if not self._ready(grader, jobs):
                    continue
                suspect = self._grade(grader, jobs)
                if suspect is not None and self._ready(grader, [suspect]):
                    self._grade(grader, [suspect], alone=True)
        except BaseException as error:  # the thread ends; see `_lose`
            for job in jobs:
                self._crash(job, in_words(error))
            raise
        finally:
            grader.end()

    def _lose(self, words: str) -> None:
        """Fail all waiting calls and every later call, because a thread of the pool has ended unexpectedly."""
        with self._changed:
            self._lost = GraderCrash(f"the grader {self.target} failed: {words}")
        self._fail_waiting(self._lost)

    def _ready(self, grader: GraderProcess, jobs: list[_Job]) -> bool:
        """Start the process if it is not running. Return whether it runs; else fail these calls and all that wait."""
        error = self._prepare(grader)
        if error is not None:
            self._put_back(jobs)
            self._fail_waiting(error)
        return error is None

    def _prepare(self, grader: GraderProcess) -> GraderCrash | None:
        """Start the process if it is not running. Return the error where it cannot be started, else None."""
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
        except Exception as error:
            grader.end()
            reason = in_words(error)
        else:
            return None
        return GraderCrash(f"the grader {self.target} could not be started: {reason}")

    def _take(self) -> list[_Job]:
        """Wait for calls, and return this worker's share of them, or no calls once the pool is closed."""
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

    def _grade(self, grader: GraderProcess, jobs: list[_Job], alone: bool = False) -> _Job | None:
        """Send calls and receive their answers. Return a call to try again alone in a new process, or None."""
        waiting = deque(job for job in jobs if not job.future.cancelled())
        limit = self.timeout_seconds * _PATIENCE
        again: _Job | None = None
        try:
            # A process that dies during this loop may have answered some calls; their answers are read below.
            with suppress(BrokenPipeError, ConnectionResetError):
                for job in waiting:
                    grader.send(job.buffers, limit)
            while waiting:
                answer = grader.receive(limit)
                self._hand_out(waiting[0], answer)
                waiting.popleft()
        except TimeoutError:
            grader.end()
            again = self._failed(waiting.popleft(), f"no answer within {limit:g} s", alone)
        except (EOFError, OSError):
            words = grader.end(patience_seconds=1.0)
            again = self._died(waiting.popleft(), grader.code, words, alone)
        except WhetError as error:
            grader.end()
            again = self._failed(waiting.popleft(), f"it sent no proper answer: {error}", alone)
        except Exception as error:  # an error of the driver itself, such as no memory for an answer
            grader.end()
            self._crash(waiting.popleft(), in_words(error))
        if waiting:
            self._put_back(list(waiting))
        return again

    def _died(self, job: _Job, code: int, words: str, alone: bool) -> _Job | None:
        """Finish a call whose process has died, or return it to be tried again."""
        if self._closed:
            self._crash(job, "the pool was closed")
        elif code in (-signal.SIGPROF, -signal.SIGXCPU):
            self._undecided(job, f"it needs more than {self.timeout_seconds:g} s of processor time")
        elif alone and code == -signal.SIGKILL:  # sent by the kernel, short of memory, or by a person; not by the pool
            self._crash(job, words)
        elif code == OUT_OF_MEMORY:
            mebibytes = self._order["memory_bytes"] / (1 << 20)
            return self._failed(job, f"it needs more memory than {mebibytes:g} MiB; {words}", alone)
        else:
            return self._failed(job, words, alone)
        return None

    def _failed(self, job: _Job, cause: str, alone: bool) -> _Job | None:
        """Finish a call that failed alone in a new process. Return any other call, to be tried again in this way."""
        if not alone:
            return job
        self._undecided(job, f"also alone in a fresh process: {cause}")
        return None

    def _hand_out(self, job: _Job, answer: Any) -> None:
        if "value" in answer:
            job.finish(answer["value"])
        elif "undecided" in answer:
            self._undecided(job, str(answer["undecided"])[:200])
        else:
            self._crash(job, str(answer.get("raised"))[:600], GraderRaised)

    def _undecided(self, job: _Job, cause: str) -> None:
        self.undecided += 1
        error = Undecided(f"the grader {self.target} cannot decide about an answer: {cause}")
        if self.undecided == 1:
            logger.warning(f"{error}. It is counted in the metric grader/undecided; where this happens often, read it")
        job.finish(None, error)

    def _crash(self, job: _Job, cause: str, kind: type[GraderCrash] | type[GraderRaised] = GraderCrash) -> None:
        self.crashes += 1
        job.finish(None, kind(f"the grader {self.target} failed: {cause}"))

    def _fail_waiting(self, error: WhetError) -> None:
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            job.finish(None, error)
