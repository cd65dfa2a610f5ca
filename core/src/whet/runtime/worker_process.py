"""The program of a worker process. It builds worker objects, runs their methods and sends the results to the driver.

    main thread     the compute thread: sync methods of all roles in this process, one after the other
    reader          receives messages from the driver
    loop            coroutine methods and async generators; their heavy work belongs on `compute_thread()`

A process has only one compute thread, so it has one pool of OpenMP threads, and roles in the same process take turns.
"""

import asyncio
import atexit
import faulthandler
import gc
import importlib
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from whet.component import resolve
from whet.errors import in_words
from whet.runtime.channel import receive, send
from whet.runtime.interpreters import refuse_another_core
from whet.runtime.threads import Guard, watched
from whet.runtime.watchdog import die_with, leave_signals_to_driver
from whet.runtime.wire import decode, encode

T = TypeVar("T")


class ComputeThread(Executor):
    """An executor that runs its jobs on the thread that calls `run`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], str] | None] = queue.SimpleQueue()
        self._thread = 0
        self.doing: tuple[str, float] = "", 0.0
        """The name of the running job, or "", and the time when it began, in seconds of `time.monotonic`."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Run a function on the thread, after all jobs that were submitted before. Return its future.

        A job must not wait for another job: `result` raises `RuntimeError` on the thread itself instead of hanging.
        """
        return self.do(getattr(fn, "__name__", "work").strip("_"), lambda: fn(*args, **kwargs))

    def do(self, name: str, function: Callable[[], T]) -> "Future[T]":
        """Run a function as `submit` does, under a name that `doing` reports."""
        future: Future[T] = _ComputeFuture(self)
        self._jobs.put((future, function, name))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End `run` after all jobs that were submitted before."""
        self._jobs.put(None)

    def run(self) -> None:
        """Run jobs on the caller's thread until `shutdown`."""
        self._thread = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            future, function, name = job
            if future.set_running_or_notify_cancel():
                self.doing = name, time.monotonic()
                try:
                    future.set_result(function())
                except StopIteration as error:  # asyncio's futures refuse it, and who awaits one would wait for ever
                    future.set_exception(RuntimeError(f"{name} raised {in_words(error)}"))
                except BaseException as error:
                    future.set_exception(error)
                self.doing = "", 0.0
            del job, future, function  # else they would keep their values in memory until the next job

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.get_ident() == self._thread


class _ComputeFuture(Future[T]):
    def __init__(self, thread: ComputeThread) -> None:
        super().__init__()
        self._compute_thread = thread

    def result(self, timeout: float | None = None) -> T:
        if not self.done() and self._compute_thread.is_current():
            raise RuntimeError("a job on the compute thread waits for another one, which can never begin")
        return super().result(timeout)


_compute: ComputeThread | None = None
_lock = threading.Lock()
_hosting = False
"""Whether this process is a worker process. `host_workers` sets it."""


def give_up(why: str) -> None:
    """End this worker process, because a worker has lost something that it cannot work without.

    The driver then sees that the process is lost, and quotes `why`; a lost replica is replaced. In a process that is
    no worker process, this does nothing.
    """
    if _hosting:
        print(why, file=sys.stderr, flush=True)
        os._exit(1)


def compute_thread() -> Executor:
    """Return the one thread of this process for heavy work. Sync methods of workers run on this thread already.

    In a process that is no worker process, for inline workers, the thread starts at the first call.
    """
    global _compute
    with _lock:
        if _compute is None:
            _compute = ComputeThread()
            threading.Thread(target=_compute.run, name="whet-compute", daemon=True).start()
        return _compute


class WorkerProcess:
    """The workers of this process, and the calls that the driver has made on them."""

    def __init__(self, connection: socket.socket, compute: ComputeThread) -> None:
        self._connection, self._compute = connection, compute
        self._sending = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._workers: dict[int, Any] = {}
        self._tasks: dict[int, tuple[int, asyncio.Task[None]]] = {}  # the number of a call: its slot and task

    def start(self) -> None:
        """Start the reader and the event loop, each on a thread of its own, and report to the driver."""
        watched("whet-reader", self._read, give_up)
        watched("whet-loop", self._loop.run_forever, give_up)
        self._live()

    def close(self) -> None:
        """Close the workers that have not been closed yet."""
        for slot in list(self._workers):
            try:
                self._close(slot)
            except Exception:
                traceback.print_exc()

    def _read(self) -> None:
        try:
            while True:
                self._take(decode(receive(self._connection)))
        except (EOFError, OSError):
            _end_all()

    def _take(self, message: dict[str, Any]) -> None:
        """Carry out one message of the driver."""
        number = message.get("number", 0)
        match message["do"]:
            case "call" | "stream" if message["slot"] not in self._workers:
                cause = f"there is no worker for {message['method']}: its build is not done or failed, or it is closed"
                self._say(number, "failed", {"cause": cause, "details": ""})
            case "call":
                self._call(number, message["slot"], message["method"], message["args"])
            case "stream":
                steps = partial(self._stream, number, message["slot"], message["method"])
                running = self._run(number, steps, message["args"])
                self._loop.call_soon_threadsafe(self._begin, number, message["slot"], running)
            case "cancel":
                self._loop.call_soon_threadsafe(self._cancel, number)
            case "build":
                self._compute.do("start", lambda: self._answer(number, lambda: self._build(message)))
            case "close":
                self._loop.call_soon_threadsafe(self._cancel_slot, message["slot"])
                self._compute.do("close", lambda: self._answer(number, lambda: self._close(message["slot"])))
            case "import":
                self._compute.do("import", lambda: import_ahead(message["modules"]))
            case "beat":
                watched("whet-heart", partial(self._beat, message["every"]), give_up)
            case "exit":
                self._compute.shutdown()

    def _call(self, number: int, slot: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            function = public_method(self._workers[slot], method)
            if inspect.isasyncgenfunction(function):
                raise TypeError(f"{method} is an async generator; use stream")
        except Exception as error:
            self._fail(number, error)
            return
        if inspect.iscoroutinefunction(function):
            self._loop.call_soon_threadsafe(self._begin, number, slot, self._run(number, function, args))
        else:
            self._compute.do(method, lambda: self._answer(number, lambda: function(*args)))

    def _beat(self, every: float) -> None:
        """Report at intervals that this process is alive, whatever its workers do."""
        guard = Guard("whet-heart", pause_seconds=0.0)
        while True:
            time.sleep(every)
            with guard.item():
                self._live()

    def _live(self) -> None:
        name, since = self._compute.doing
        self._say(0, "alive", {"doing": name, "seconds": time.monotonic() - since if name else 0.0})

    def _build(self, message: dict[str, Any]) -> None:
        self._workers[message["slot"]] = resolve(message["target"])(rank=message["rank"], **message["arguments"])

    def _close(self, slot: int) -> None:
        worker = self._workers.pop(slot, None)
        try:
            if hasattr(worker, "close"):
                worker.close()
        finally:
            del worker
            if self._workers:  # they need the memory that cycles of the closed one still hold
                gc.collect()

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        try:
            self._say(number, "done", work())
        except BaseException as error:
            self._fail(number, error)

    def _begin(self, number: int, slot: int, steps: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(steps)
        self._tasks[number] = slot, task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number][1].cancel()

    def _cancel_slot(self, slot: int) -> None:
        for owner, task in self._tasks.values():
            if owner == slot:
                task.cancel()

    async def _run(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._say(number, "done", await function(*args))
        except BaseException as error:
            self._fail(number, error)

    async def _stream(self, number: int, slot: int, method: str, *args: Any) -> None:
        async with aclosing(public_method(self._workers[slot], method)(*args)) as items:
            async for item in items:
                self._say(number, "part", item)

    def _fail(self, number: int, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):  # by the driver, or because the workers close
            self._say(number, "failed", {"cause": "it was cancelled", "details": ""})
            return
        details = "".join(traceback.format_exception(error))
        with suppress(OSError):  # the disk of the log may be full; the driver must get the error in any case
            print(details, file=sys.stderr, flush=True)
        self._say(number, "failed", {"cause": in_words(error), "details": details})

    def _say(self, number: int, kind: str, value: Any) -> None:
        buffers = encode({"number": number, "say": kind, "value": value})
        try:
            with self._sending:
                send(self._connection, buffers)
        except OSError:
            _end_all()


def public_method(worker: Any, name: str) -> Callable[..., Any]:
    """Return a worker's method by name. Raises `AttributeError` for a private name or a name that is no method."""
    method: Callable[..., Any] | None = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(method):
        raise AttributeError(f"{type(worker).__name__} has no public method {name!r}")
    return method


def import_from(path: list[str], add: list[str]) -> None:
    """Set the folders from which this process imports.

    `path` replaces the interpreter's own folders, unless it is empty. Existing folders of `add` are appended.
    """
    sys.path[:] = path or sys.path
    sys.path += [folder for folder in add if folder not in sys.path and os.path.isdir(folder)]


def import_ahead(modules: list[str]) -> None:
    """Import modules before they are needed. An import that fails here raises its error where it is needed.

    The garbage collector rests meanwhile, and then leaves the modules alone: after a fork it would copy their memory.
    """
    gc.disable()
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _end_all() -> NoReturn:
    """Kill this process and all that it started, because the driver is gone."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def host_workers(connection: socket.socket, name: str) -> NoReturn:
    """Serve workers until the driver, at the other end of the connection, sends `exit` or is gone. End this process."""
    global _compute, _hosting
    sys.argv = ["whet-worker", name]
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)  # the driver asks for the stacks when a deadline is missed
    order = decode(receive(connection))
    refuse_another_core(order["core"], order["wire"])
    import_from(order["path"], order["add"])
    _compute, _hosting = ComputeThread(), True
    hosted = WorkerProcess(connection, _compute)
    hosted.start()
    _compute.run()
    hosted.close()
    # As Python ends, except that it would take every module apart, which takes half a second where torch is.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Run the program of a worker process."""
    descriptor, parent, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with(parent)
    leave_signals_to_driver()
    os.set_inheritable(descriptor, False)
    host_workers(socket.socket(fileno=descriptor), name)


if __name__ == "__main__":
    from whet.runtime import worker_process  # not this file, `__main__`: workers use the module's compute thread

    worker_process.main()
