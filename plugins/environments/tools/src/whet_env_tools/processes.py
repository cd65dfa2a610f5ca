"""Processes that host tools, as the driver sees them: started, called within a deadline, replaced, ended.

How a call can fail, and what follows:

    the tool says that the call is wrong, or raises     the model reads it
    the call is late, its process or server dies,       another process is started, and the call is repeated there;
    answers too much, or answers nonsense               if that fails too, the model reads that it failed
    a process or server cannot be started               ToolsBroken: the episode is played again
    calls of several episodes in a row fail twice       ToolsBroken, until a call succeeds again

Everything here runs on its own thread, so episodes of several event loops can share the processes.
"""

import asyncio
import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from attrs import define, field, frozen

from whet.errors import InfrastructureError, WhetError, in_words
from whet.runtime.last_words import printable
from whet.runtime.process import Child, import_folders
from whet_env_tools.hosted.host import LONGEST_LINE
from whet_sandbox.gate import Gate

T = TypeVar("T")
_GRACE_SECONDS: Final = 15.0
"""How much later than its deadline a process may answer, because the process enforces the deadline itself."""
_MOST_WORDS: Final = 1 << 14
_MOST_IN_A_ROW: Final = 4
"""After failed calls of this many episodes without another in between, the tools count as broken, and not the calls.

Each failed twice. The calls of one episode do not suffice: a response could declare its tools broken, and not count.
"""
_TRIES: Final = 2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0


class ToolsBroken(InfrastructureError):  # noqa: N818 - it says what the tools are
    """A process or server of tools cannot be started, or fails call after call."""


@frozen
class Order:
    """What a process hosts, and its limits."""

    name: str
    """Its name in errors."""
    what: Mapping[str, Any]
    """`functions` or `server`, as `whet_env_tools.hosted.host` reads it. Its start adds the values of variables."""
    start_seconds: float
    call_seconds: float
    memory_bytes: int


def whole(text: str) -> str:
    """Return text with U+FFFD in place of each half of a character (lone surrogate), which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@frozen
class Outcome:
    """The outcome of a call."""

    text: str = field(converter=whole)
    error: bool = False
    """Whether the tool refused the call, or raised."""
    failed: bool = False
    """Whether the call failed twice: it was late, or its process ended."""
    state: Mapping[str, Any] | None = None


class _Lost(WhetError):  # noqa: N818 - it says what the process is
    """A process can answer no further call."""


class ToolThread:
    """The thread on whose event loop all processes of one environment are served."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-tools", daemon=True)
        self._thread.start()

    def run(self, made: Callable[[], Awaitable[T]]) -> T:
        """Wait for a result, outside of any event loop."""
        return self._future(made).result()

    async def call(self, made: Callable[[], Awaitable[T]]) -> T:
        """Wait for a result. Cancelling the caller cancels the work."""
        return await asyncio.wrap_future(self._future(made))

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _future(self, made: Callable[[], Awaitable[T]]) -> "Future[T]":
        async def awaited() -> T:
            return await made()

        coroutine = awaited()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise ToolsBroken("the tools are closed") from error


class HostProcess:
    """One process with tools."""

    def __init__(self, order: Order) -> None:
        self.order, self.calls = order, 0
        """`calls`: calls under way."""
        self.tools: list[dict[str, Any]] = []
        self.over = ""
        """Why it answers no further call. Empty: it answers calls."""
        self._child: Child | None = None
        self._numbers = itertools.count(1)
        self._waiting = dict[int, asyncio.Future[dict[str, Any]]]()
        self._words = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._transport: asyncio.BaseTransport | None = None

    async def start(self) -> None:
        """Start the process and its server, and learn its tools. Raises `ToolsBroken`."""
        order = self.order
        try:
            async with asyncio.timeout(order.start_seconds + _GRACE_SECONDS):
                self._child = Child(
                    "whet_env_tools.hosted.host", order.name, environment=dict(os.environ),
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )  # fmt: skip
                self._tasks.append(asyncio.create_task(self._listen()))
                reader, self._writer = await asyncio.open_connection(sock=self._child.socket, limit=LONGEST_LINE)
                self._send({"path": import_folders(), "memory_bytes": order.memory_bytes, **_filled(order.what)})
                first = json.loads(await reader.readline() or b"{}")
        except (OSError, ValueError, TimeoutError) as error:
            self.over = f"it did not start within {order.start_seconds:g} s" if isinstance(error, TimeoutError) else ""
            self.over = self.over or in_words(error)
            first = {}
        if "tools" not in first:
            why = str(first.get("broken") or self.over or "its process ended")
            self.over = why
            words = await self.stop()
            raise ToolsBroken(f"{order.name} cannot be started: {why}{words}")
        self.tools = first["tools"]
        self._tasks.append(asyncio.create_task(self._receive(reader)))

    async def call(self, tool: str, arguments: Mapping[str, Any], episode: Mapping[str, Any]) -> Outcome | None:
        """Call a tool. None: the call was late, and the process can serve others. Raises `_Lost`."""
        if self.over:
            raise _Lost(self.over)
        number, seconds = next(self._numbers), self.order.call_seconds
        self._waiting[number] = answered = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "tool": tool, "arguments": arguments, "episode": episode, "seconds": seconds})
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                answer = await answered
        except TimeoutError:
            self._lose(f"it did not answer within {seconds:g} s, and blocks")
            raise _Lost(self.over) from None
        except asyncio.CancelledError:
            with suppress(OSError, RuntimeError):
                self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "broken" in answer:
            late = f"it did not answer within {seconds:g} s, and then " if answer.get("late") else ""
            self._lose(late + str(answer["broken"])[:500])
            raise _Lost(self.over)
        if answer.get("late"):
            return None
        return Outcome(str(answer["text"]), bool(answer["error"]), state=answer.get("state"))

    async def stop(self) -> str:
        """End the process and all that it started. Return its last words, for an error."""
        child, self._child = self._child, None
        for task in self._tasks[1:]:
            task.cancel()
        if child is None:
            return ""
        child.signal()
        end = await asyncio.to_thread(child.end)
        if self._tasks:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._tasks[0], 1.0)
        self._lose(end)
        if (writer := getattr(self, "_writer", None)) is not None:
            writer.close()
        if self._transport is not None:
            self._transport.close()
        words = printable(self._words)
        return f"\nIts last words:\n{words}" if words else ""

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        """Keep the last words of the process. A full pipe would block it."""
        assert self._child is not None
        assert self._child.process.stderr is not None
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, self._child.process.stderr)
        while data := await reader.read(1 << 16):
            self._words = (self._words + data)[-_MOST_WORDS:]

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        why = "its process ended"
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            why = f"it sent what is no answer: {in_words(error)}"
        except OSError:
            pass
        self._lose(why)

    def _lose(self, why: str) -> None:
        self.over = self.over or why
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"broken": self.over})


@define(eq=False)
class _Place:
    """A place for one process."""

    lock: asyncio.Lock
    host: HostProcess | None = None
    under_way: int = 0


class Hosts:
    """Processes with the same tools. A call goes to the process with the fewest calls under way."""

    def __init__(self, order: Order, processes: int = 1, at_once: int = 1, *, remembers: bool = False) -> None:
        """Start nothing yet.

        :param at_once: most calls at a time of each process.
        :param remembers: a process has a state that no other process has, so a lost one is not replaced: `ToolsBroken`.
        """
        self.order, self._remembers = order, remembers
        self.restarts = 0
        """Processes that had to be replaced."""
        self._places = [_Place(asyncio.Lock()) for _ in range(processes)]
        self.free = Gate(processes * at_once)
        """The places of calls. A caller takes one on the loop of its episode, whose clock stands still meanwhile."""
        self._failing = set[int]()
        """The seeds of the episodes whose calls have failed since a call succeeded."""
        self._refused, self._not_before = "", 0.0
        self._failures_to_start = 0
        self._closed = False

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools, as a process describes them. Raises `ToolsBroken`."""
        return (await self._host(self._places[0])).tools

    async def call(self, tool: str, arguments: Mapping[str, Any], episode: Mapping[str, Any]) -> Outcome:
        """Call a tool, once more in another process if the first fails. Raises `ToolsBroken`."""
        why = ""
        place = min(self._places, key=lambda one: one.under_way)
        place.under_way += 1
        try:
            for _ in range(_TRIES):
                host = await self._host(place)
                try:
                    found = await host.call(tool, arguments, episode)
                except _Lost as error:
                    why = str(error)
                    await self._replace(place, host)
                    if self._remembers:
                        raise ToolsBroken(f"{self.order.name} was lost in a call of {tool!r}: {why}") from error
                    continue
                if found is not None:
                    self._failing.clear()
                    return found
                why = f"it did not answer within {self.order.call_seconds:g} s"
                if self._remembers:  # a second call might act a second time
                    break
        finally:
            place.under_way -= 1
        self._failing.add(int(episode["seed"]))
        if len(self._failing) >= _MOST_IN_A_ROW:
            raise ToolsBroken(
                f"{self.order.name} failed in calls of {len(self._failing)} episodes in a row, each tried twice; "
                f"last, in a call of {tool!r}: {why}"
            )
        return Outcome(f"The call of {tool} failed: {why}", error=True, failed=True)

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for place in self._places:
            async with place.lock:
                host, place.host = place.host, None
                if host is not None:
                    await host.stop()

    async def _host(self, place: _Place) -> HostProcess:
        async with place.lock:
            if self._closed:
                raise ToolsBroken(f"{self.order.name} is closed")
            if place.host is not None and not place.host.over:
                return place.host
            if place.host is not None:
                await place.host.stop()
                place.host = None
                self.restarts += 1
            if time.monotonic() < self._not_before:
                raise ToolsBroken(self._refused)
            host = HostProcess(self.order)
            try:
                await host.start()
            except ToolsBroken as error:
                pause = min(_FIRST_PAUSE * 4**self._failures_to_start, _LONGEST_PAUSE)
                self._failures_to_start += 1
                self._refused, self._not_before = str(error), time.monotonic() + pause
                raise
            except BaseException:  # the caller was cancelled
                await asyncio.shield(host.stop())
                raise
            self._failures_to_start = 0
            place.host = host
            return host

    async def _replace(self, place: _Place, lost: HostProcess) -> None:
        """End a process that is lost, unless another call has done it."""
        async with place.lock:
            if place.host is lost:
                place.host = None
                self.restarts += 1
                await lost.stop()


def _filled(what: Mapping[str, Any]) -> dict[str, Any]:
    """Return an order with the values of the environment variables that it names. Such values are never in a config."""
    server = what.get("server")
    if server is None:
        return dict(what)
    variables = {name: os.environ[name] for name in server["variables"] if name in os.environ}
    token = os.environ.get(server["token_variable"], "") if server["token_variable"] else ""
    return {"server": {**server, "environment": variables, "token": token}}
