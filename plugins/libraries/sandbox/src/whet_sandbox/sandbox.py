"""Run programs that nobody has reviewed, in sandboxes.

    sandbox = open_sandbox(NamespacesConfig(warm=2))
    result = await sandbox.run(code="print(6 * 7)")
    result.why, result.exit, result.stdout         # "exit", 0, "42\\n"

    async with sandbox.session() as session:       # files and, with `ask`, one process are kept from call to call
        await session.run(code="open('a', 'w').write('x')")
        result = await session.run(["/bin/cat", "a"])

Whatever a program does, `run` returns a `Result` that states it, within the deadline. `SandboxBroken` is raised only if
the sandbox itself failed; then nothing is known about the program. If the machine cannot build one of the walls of a
sandbox, every call raises. No program runs without all walls.
"""

import asyncio
import select
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

from attrs import evolve, field, frozen

from whet.errors import WhetError, in_words
from whet_sandbox.gate import Gate
from whet_sandbox.isolation import frames
from whet_sandbox.limits import Limits
from whet_sandbox.provider import Provider, SandboxBroken

_READY_SECONDS: Final = 60.0
_GRACE_SECONDS: Final = 60.0
"""How much later than its deadline a supervisor's answer may come, because the machine may be busy."""
_TRIES: Final = 2
_MAIN: Final = "main.py"


@frozen
class Result:
    """The outcome of a program."""

    why: str
    """How it ended: `exit`, `signal`, `cpu`, `wall`, `memory`, `output`, `answer`, `spoiled` or `stopped`; see
    `whet_sandbox.isolation.supervisor`."""
    exit: int
    """Its exit code, or minus the number of the signal that ended it."""
    stdout: str
    """What it wrote to stdout, up to the limit. Bytes that are no UTF-8 are replaced."""
    stderr: str
    """What it wrote to stderr."""
    files: Mapping[str, bytes] = field(factory=dict)
    """The requested files, by path. A file that is not plain, or exceeds the limit, is left out."""

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself with exit code 0. This does not prove that it did its work."""
        return self.why == "exit" and self.exit == 0


@frozen
class Answer:
    """The answer of a program to a question."""

    line: bytes
    """The line that it answered, without the line end."""
    stdout: str
    """What it wrote to stdout since the last answer."""
    stderr: str
    """What it wrote to stderr since the last answer."""


class Sandbox:
    """Runs programs in sandboxes of a provider. It may be used from several event loops and threads."""

    def __init__(self, provider: Provider, limits: Limits | None = None, at_once: int | None = None) -> None:
        """Store the settings; no sandbox is made yet. `limits` are for calls without limits of their own.

        :param at_once: most sandboxes at a time; none of them is warm. None: as many as the provider states.
        """
        self.limits = limits or Limits()
        self.at_once = provider.at_once if at_once is None else at_once
        self._warm = provider.warm if at_once is None else 0
        self._provider, self._gate = provider, Gate(self.at_once)
        self._waiting: list[socket.socket] = []
        self._lock, self._closed = threading.Lock(), False

    async def run(
        self,
        argv: Sequence[str] = (),
        *,
        code: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        limits: Limits | None = None,
        collect: Sequence[str] = (),
    ) -> Result:
        """Run a program in a sandbox of its own, and return its result. All processes that it started have ended by
        then.

        :param argv: the program's absolute path and its arguments.
        :param code: Python code instead of `argv`. It runs as `main.py`.
        :param files: relative paths and contents of files in its working directory.
        :param collect: relative paths of the files to return.
        """
        async with self.session(limits) as session:
            return await session.run(argv, code=code, files=files, stdin=stdin, collect=collect, last=True)

    @asynccontextmanager
    async def session(self, limits: Limits | None = None) -> "AsyncIterator[Session]":
        """Open a sandbox for several programs, one after another. It ends with the block."""
        limits = limits or self.limits
        async with self._gate.place():
            session = await self._opened(limits)
            async with session:
                yield session

    def heat(self) -> None:
        """Make the warm sandboxes now, before the first call."""
        with self._lock:
            while len(self._waiting) < self._warm and not self._closed:
                self._waiting.append(self._provider.open(self.limits))

    def why_not(self) -> str:
        """Run a small program, and return why that is impossible on this machine. Empty: it works."""

        async def attempt() -> str:
            result = await self.run(code="print(6 * 7)", limits=evolve(self.limits, wall_seconds=60.0))
            return "" if result.stdout == "42\n" else f"a small program ended so: {result}"

        try:
            with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this thread
                return thread.submit(asyncio.run, attempt()).result()
        except WhetError as error:
            return str(error)
        except Exception as error:
            return in_words(error)

    def close(self) -> None:
        """End all sandboxes. Calls under way raise `SandboxBroken`."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.close()
        self._provider.close()

    async def _opened(self, limits: Limits) -> "Session":
        """Return a new session. A sandbox that cannot be made is tried once more."""
        for attempt in range(_TRIES):
            session = Session(self._take(limits), self._provider, limits)
            try:
                await session.ready()
            except SandboxBroken:
                session.abandon()
                if attempt + 1 == _TRIES:
                    raise
            except BaseException:
                session.abandon()
                raise
            else:
                with suppress(SandboxBroken):  # the next call that needs one opens it, or says why it cannot
                    self.heat()
                return session
        raise AssertionError

    def _take(self, limits: Limits) -> socket.socket:
        with self._lock:
            if self._closed:
                raise SandboxBroken("the sandbox is closed")
            same = (limits.disk_mib, limits.disk_files) == (self.limits.disk_mib, self.limits.disk_files)
            while self._waiting and same:
                connection = self._waiting.pop(0)
                if not _is_lost(connection):
                    return connection
                connection.close()
        return self._provider.open(limits)


class Session:
    """One sandbox, for one program at a time."""

    def __init__(self, connection: socket.socket, provider: Provider, limits: Limits) -> None:
        connection.setblocking(False)
        self._connection, self._provider, self._limits = connection, provider, limits

    async def __aenter__(self) -> Self:
        """Return the session."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the sandbox and all that runs in it."""
        self.abandon()

    async def ready(self) -> None:
        """Wait until the sandbox is made. Raises `SandboxBroken`."""
        await self._answer("ready", _READY_SECONDS)

    async def run(
        self,
        argv: Sequence[str] = (),
        *,
        code: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
        stdin: str | bytes = b"",
        limits: Limits | None = None,
        collect: Sequence[str] = (),
        last: bool = False,
    ) -> Result:
        """Run a program until it ends; see `Sandbox.run`. Processes that it left are ended; its files are kept.

        :param limits: limits of this program. Limits of the disk have no effect: the sandbox has them already.
        :param last: end the sandbox with this program.
        """
        header, blobs = self._order("run", argv, code, files, stdin, limits)
        header |= {"collect": [_checked(path) for path in collect], "last": last}
        seconds = header["limits"]["wall_seconds"]
        return _result(*await self._request(header, blobs, ("result",), seconds))

    async def start(
        self,
        argv: Sequence[str] = (),
        *,
        code: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Start a program that answers questions: it reads lines from descriptor 3 and writes lines to descriptor 4."""
        header, blobs = self._order("start", argv, code, files, b"", limits)
        answer, contents = await self._request(header, blobs, ("started", "result"), 0.0)
        if answer["is"] == "result":
            raise ProgramEnded(_result(answer, contents))

    async def ask(self, question: bytes, wall_seconds: float | None = None) -> Answer:
        """Ask the started program, and return its answer. Raises `ProgramEnded` if the program ends instead.

        `question`: one line, without the line end. `wall_seconds`: the deadline; None: the limit of the session.
        """
        if b"\n" in question:
            raise ValueError("a question is one line")
        seconds = self._limits.wall_seconds if wall_seconds is None else wall_seconds
        header = {"do": "ask", "wall_seconds": seconds, "collect": [], "last": False}
        answer, blobs = await self._request(header, [question], ("answer", "result"), seconds)
        if answer["is"] == "result":
            raise ProgramEnded(_result(answer, blobs))
        return Answer(blobs[0], _text(blobs[1]), _text(blobs[2]))

    async def stop(self, collect: Sequence[str] = ()) -> Result:
        """Stop the started program, and return its result."""
        header = {"do": "stop", "collect": [_checked(path) for path in collect], "last": False}
        return _result(*await self._request(header, [], ("result",), 0.0))

    def abandon(self) -> None:
        """Close the connection. The supervisor then ends the sandbox."""
        self._connection.close()

    def _order(
        self, do: str, argv: Sequence[str], code: str | None, files: Mapping[str, str | bytes] | None,
        stdin: str | bytes, limits: Limits | None,
    ) -> tuple[dict[str, Any], list[bytes]]:  # fmt: skip
        if bool(argv) == (code is not None):
            raise ValueError("wanted one of argv and code")
        held = {_checked(path): _bytes(content) for path, content in (files or {}).items()}
        if code is not None:
            held[_MAIN] = _bytes(code)
            argv = (self._provider.python, "-s", _MAIN)
        header = {
            "do": do,
            "argv": list(argv),
            "environment": {**_ENVIRONMENT, **self._provider.environment},
            "limits": (limits or self._limits).as_order(),
            "files": list(held),
        }
        return header, [_bytes(stdin), *held.values()]

    async def _request(
        self, header: dict[str, Any], blobs: Sequence[bytes], wanted: Sequence[str], seconds: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        try:
            message = frames.pack(header, blobs)
        except frames.FrameError as error:
            raise WhetError(f"the program cannot be sent to its sandbox: {error}") from error
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                await asyncio.get_running_loop().sock_sendall(self._connection, message)
        except (OSError, TimeoutError) as error:
            self.abandon()
            raise SandboxBroken(f"a sandbox took no order: {in_words(error)}") from error
        except BaseException:
            self.abandon()
            raise
        return await self._answer(wanted, seconds + _GRACE_SECONDS)

    async def _answer(self, wanted: str | Sequence[str], seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        try:
            async with asyncio.timeout(seconds):
                header, body = frames.sizes(await self._exactly(frames.PREFIX.size))
                answer, blobs = frames.unpack(await self._exactly(header), await self._exactly(body))
            if answer["is"] == "broken":
                raise SandboxBroken(f"a sandbox broke: {answer['reason']}")
            if answer["is"] not in wanted:
                raise SandboxBroken(f"a sandbox answered {answer['is']!r}, wanted {wanted!r}")
        except TimeoutError as error:
            self.abandon()
            raise SandboxBroken(f"a sandbox did not answer within {seconds:g} s") from error
        except (OSError, ValueError, frames.FrameError) as error:
            self.abandon()
            raise SandboxBroken(f"a sandbox was lost: {in_words(error)}") from error
        except BaseException:  # also where the caller is cancelled in the middle of an answer
            self.abandon()
            raise
        return answer, blobs

    async def _exactly(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            part = await loop.sock_recv(self._connection, min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionError("its supervisor has ended")
            data += part
        return bytes(data)


class ProgramEnded(WhetError):  # noqa: N818 - it says what happened
    """A program ended instead of answering."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"the program ended: {result.why}, exit {result.exit}")
        self.result = result


_ENVIRONMENT: Final = {
    "PATH": "/python/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _is_lost(connection: socket.socket) -> bool:
    """Return whether the supervisor at the other end has ended, e.g. with its launcher."""
    looking = select.poll()
    looking.register(connection, 0)
    return bool(looking.poll(0))


def _result(header: dict[str, Any], blobs: Sequence[bytes]) -> Result:
    stdout, stderr, *contents = blobs
    files = dict(zip(header["files"], contents, strict=True))
    return Result(header["why"], header["exit"], _text(stdout), _text(stderr), files)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


def _checked(path: str) -> str:
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"the path {path!r:.80} is not a relative path below the sandbox's folder")
    return path
