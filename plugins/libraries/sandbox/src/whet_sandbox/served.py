"""Foreign libraries that answer questions from inside sandboxes.

    served = Served(open_sandbox(with_installed(config.sandbox), limits), code, {"dataset": "countdown"}, processes=2)
    task = served.ask_now({"make": 7}, seconds=60)        # from any thread
    score = await served.ask({"score": "1+2"}, seconds=30)   # from any event loop

The code is a program of a plugin: it reads a line of JSON from descriptor 3, and writes a line of JSON to descriptor 4.
The first question is the setup, and its answer the greeting. A process is started by the first question that needs it,
and again after it has ended. So a library may hang, crash or use too much memory, also because of a model's text. This
process does not import the library, so it may be in another environment, with releases that conflict with this one's.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from attrs import evolve

from whet.component import Selection
from whet.errors import WhetError
from whet_sandbox.config import NamespacesConfig
from whet_sandbox.provider import SandboxBroken
from whet_sandbox.sandbox import ProgramEnded, Sandbox, Session

_LAST_WORDS: Final = 500
T = TypeVar("T")


def with_installed(chosen: Selection) -> Selection:
    """Return a section `sandbox` in which programs can import what is installed beside this process.

    A section of `namespaces` with packages or a Python of its own, and one of another provider, are returned unchanged.
    """
    config = chosen.config
    if not isinstance(config, NamespacesConfig) or config.python or config.packages:
        return chosen
    return evolve(chosen, config=evolve(config, packages=_installed()))


def is_installed(chosen: Selection, package: str) -> bool:
    """Return whether programs in a sandbox can import a package, as far as its folders show that without a start."""
    config = with_installed(chosen).config
    return not isinstance(config, NamespacesConfig) or any(
        os.path.exists(os.path.join(folder, name)) for folder in config.packages for name in (package, f"{package}.py")
    )


def _installed() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]


class Served:
    """Processes that answer questions. They may be asked from several event loops and threads."""

    def __init__(
        self, sandbox: Sandbox, code: str, setup: Mapping[str, Any], files: Mapping[str, str] | None = None,
        *, processes: int = 1, start_seconds: float = 120.0,
    ) -> None:  # fmt: skip
        """Start nothing yet.

        :param files: further files in the folder of the program, e.g. modules that it imports.
        :param sandbox: it is closed with this object. It must allow `processes` sandboxes at a time.
        :param start_seconds: the time in which a process must answer the setup.
        """
        self._sandbox, self._code, self._files = sandbox, code, dict(files or {})
        self._setup, self._start_seconds = dict(setup), start_seconds
        self._processes = [_Process() for _ in range(processes)]
        self._lock, self._closed = threading.Lock(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def ask(self, question: Mapping[str, Any], seconds: float, process: int | None = None) -> Any:
        """Return the answer to a question.

        Raises `ProgramEnded` where the process ended instead, and `SandboxBroken` where it could not be started.

        :param process: the process to ask, if it has a state. None: the process with the fewest waiting questions.
        """
        return await asyncio.wrap_future(self._submit(self._ask(question, seconds, process)))

    def ask_now(self, question: Mapping[str, Any], seconds: float) -> Any:
        """Return the answer to a question, for a caller that is no coroutine; see `ask`."""
        return self._submit(self._ask(question, seconds, None)).result()

    def greeting(self) -> Any:
        """Return the answer to the setup. Raises `SandboxBroken` where a process cannot be started."""
        return self._submit(self._greeting()).result()

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._ended(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        self._sandbox.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if self._closed:
                work.close()
                raise WhetError("the processes of a library in sandboxes are closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="whet-served", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ask(self, question: Mapping[str, Any], seconds: float, number: int | None) -> Any:
        process = min(self._processes, key=lambda one: one.waiting) if number is None else self._processes[number]
        async with process:
            session = await self._started(process)
            return await process.answer(session, question, seconds)

    async def _greeting(self) -> Any:
        process = self._processes[0]
        async with process:
            await self._started(process)
            return process.greeting

    async def _ended(self) -> None:
        others = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for process in self._processes:
            await process.end()

    async def _started(self, process: "_Process") -> Session:
        """Return the session of a process that runs."""
        if process.session is None:
            process.session = await process.stack.enter_async_context(self._sandbox.session())
            try:
                await process.session.start(code=self._code, files=self._files)
                process.greeting = await process.answer(process.session, self._setup, self._start_seconds)
            except ProgramEnded as error:
                raise SandboxBroken(f"a library cannot be started in its sandbox: {ended(error)}") from error
        return process.session


class _Process:
    """One process: it answers one question at a time."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.greeting: Any = None
        self.stack, self.waiting = AsyncExitStack(), 0
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> None:
        self.waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.waiting -= 1
            raise

    async def __aexit__(self, *error: Any) -> None:
        self.waiting -= 1
        self._turn.release()

    async def answer(self, session: Session, question: Mapping[str, Any], seconds: float) -> Any:
        """Return the answer of the running process. Any error ends the process, and another one is started."""
        try:
            return json.loads((await session.ask(json.dumps(question).encode(), seconds)).line)
        except ValueError as error:
            await self.end()
            raise SandboxBroken(f"a library in a sandbox answered no JSON: {error}") from error
        except BaseException:  # also if the caller is cancelled: the next question would get this answer
            await self.end()
            raise

    async def end(self) -> None:
        """End the process."""
        self.session = None
        await self.stack.aclose()


def ended(error: ProgramEnded) -> str:
    """Return how a process ended, in words, with its last words."""
    result = error.result
    words = result.stderr.strip()[-_LAST_WORDS:]
    return f"it ended by {result.why!r}, exit code {result.exit}" + (f": {words}" if words else "")
