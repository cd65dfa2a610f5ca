"""Workers in the driver's own process, so that a debugger works: breakpoints stop, tracebacks are complete.

Sync methods run in the calling thread, async generators in the caller's event loop. Arguments and results are encoded
and decoded as on the wire: a value that cannot be sent between processes fails here as well. There are no deadlines,
because a thread cannot be ended.
"""

import asyncio
import inspect
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from typing import Any

from attrs import frozen

from whet.component import resolve
from whet.errors import WhetError, WorkerError, in_words
from whet.interfaces.workers import Heard, Pending, WorkerRank
from whet.runtime.threads import run_coroutine
from whet.runtime.wire import decode, encode
from whet.runtime.worker_process import public_method
from whet.runtime.workers import Answers


@frozen
class InlineWorkerGroup:
    """A worker group whose workers are objects of this process."""

    role: str
    size: int = 1
    threads: int = 1
    device: str = "cpu"

    @property
    def host_groups(self) -> tuple[str, ...]:
        """Return the name of this process, once for each rank."""
        return ("inline",) * self.size

    def spawn(self, target: str, arguments: Mapping[str, Any]) -> "InlineWorkers":
        """Build one worker object for each rank."""

        def build(rank: int) -> Any:
            place = WorkerRank(self.role, rank, self.size, threads=self.threads, device=self.device)
            with _worker_errors(self.role, rank, "start"):
                return resolve(target)(rank=place, **_crossed(dict(arguments)))

        return InlineWorkers(self.role, self.size, build)


class InlineWorkers:
    """The worker objects of one role in this process."""

    alone = True

    def __init__(self, role: str, size: int, build: Callable[[int], Any]) -> None:
        self.role, self.size, self._build = role, size, build
        self._workers = [build(rank) for rank in range(size)]
        self._loop: asyncio.AbstractEventLoop | None = None  # where streams run; coroutine methods run there too

    def call(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> list[Any]:
        """Call on every rank, one after the other, and return the results in rank order."""
        return self.scatter(method, [args] * self.size, phase=phase, timeout_seconds=timeout_seconds)

    def start(self, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None) -> Pending:
        """Call on every rank before this returns. An error is raised by `result`."""
        return _over(lambda: self.call(method, *args, phase=phase))

    def start_on(
        self, rank: int, method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Pending:
        """Call on one rank before this returns."""
        return _over(lambda: [self._call(rank, method, _crossed(args), phase or method)])

    def start_each(
        self, ranks: Collection[int], method: str, *args: Any, phase: str = "", timeout_seconds: float | None = None
    ) -> Answers:
        """Call on each of these ranks before this returns."""
        answers = Answers(ranks)
        for rank in ranks:
            try:
                answers.finish(rank, self._call(rank, method, _crossed(args), phase or method), None)
            except WorkerError as error:
                answers.finish(rank, None, error)
        return answers

    def scatter(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, phase: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call rank i with arguments[i], one after the other, and return the results in rank order."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for the {self.size} ranks of {self.role}")
        sent = [_crossed(tuple(args)) for args in arguments]
        return [self._call(rank, method, args, phase or method) for rank, args in enumerate(sent)]

    async def stream(self, rank: int, method: str, *args: Any, phase: str = "") -> AsyncGenerator[Any, None]:
        """Iterate an async-generator method of one rank in the caller's event loop."""
        self._loop = asyncio.get_running_loop()
        sent = _crossed(args)
        with _worker_errors(self.role, rank, phase or method):
            async with aclosing(self._method(rank, method)(*sent)) as items:
                async for item in items:
                    yield _crossed(item)

    def streams(self, method: str, shares: Mapping[int, list[Any]], *, phase: str = "") -> AsyncGenerator[Heard, None]:
        """Iterate an async-generator method of several ranks in the caller's event loop, at the same time."""
        return merged({rank: self.stream(rank, method, share, phase=phase) for rank, share in shares.items()})

    def restart(self, rank: int) -> None:
        """Close the worker of one rank and build it again."""
        self._close(rank, self._workers[rank])
        self._workers[rank] = self._build(rank)

    def close(self) -> None:
        """Call the `close` of each worker that has one, and drop the workers."""
        workers, self._workers = self._workers, []
        for rank, worker in enumerate(workers):
            self._close(rank, worker)

    def _close(self, rank: int, worker: Any) -> None:
        try:
            with _worker_errors(self.role, rank, "close"):
                if hasattr(worker, "close"):
                    worker.close()
        except WorkerError as error:  # the worker is dropped anyway: print the error and go on
            print(error.details, file=sys.stderr)

    def _call(self, rank: int, method: str, args: tuple[Any, ...], phase: str) -> Any:
        with _worker_errors(self.role, rank, phase):
            function = self._method(rank, method)
            if inspect.isasyncgenfunction(function):
                raise TypeError(f"{method} is an async generator; use stream")
            result = self._await(function(*args)) if inspect.iscoroutinefunction(function) else function(*args)
            return _crossed(result)

    def _method(self, rank: int, name: str) -> Callable[..., Any]:
        if not self._workers:
            raise WorkerError(self.role, rank, name, "the workers are closed")
        return public_method(self._workers[rank], name)

    def _await(self, coroutine: Any) -> Any:
        if self._loop is not None and self._loop.is_running():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        return run_coroutine(coroutine)


async def merged(streams: Mapping[int, AsyncIterator[Any]]) -> AsyncGenerator[Heard, None]:
    """Yield the items of the streams of several ranks as they arrive."""
    heard = asyncio.Queue[Heard]()

    async def follow(rank: int, stream: AsyncIterator[Any]) -> None:
        error: Exception | None = None
        try:
            async for item in stream:
                heard.put_nowait(Heard(rank, (item,)))
        except Exception as raised:
            error = raised
        finally:
            await close_stream(stream)
        heard.put_nowait(Heard(rank, over=True, error=error))

    tasks = [asyncio.create_task(follow(rank, stream)) for rank, stream in streams.items()]
    left = len(tasks)
    try:
        while left:
            one = await heard.get()
            left -= one.over
            yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_stream(stream: AsyncIterator[Any]) -> None:
    """Close a stream, if it has an `aclose`."""
    close: Callable[[], Any] | None = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def _over(call: Callable[[], list[Any]]) -> "Future[list[Any]]":
    """Return a call that is over: its results or its error."""
    over = Future[list[Any]]()
    try:
        over.set_result(call())
    except WhetError as error:
        over.set_exception(error)
    return over


@contextmanager
def _worker_errors(role: str, rank: int, phase: str) -> Iterator[None]:
    """Turn an exception of a worker into a `WorkerError` that is chained from it."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:  # whatever the worker's code raises
        details = "".join(traceback.format_exception(error))
        raise WorkerError(role, rank, phase, in_words(error), details=details) from error


def _crossed(value: Any) -> Any:
    """Return the value as it would arrive in another process."""
    return decode(encode(value))
