"""Where foreign agents reach a model: one server for all that is open, and a key for each, made for the occasion.

    POST /v1/chat/completions     key -> line -> answers, recorded by what stands behind the line
    POST /v1/completions          a client that goes away cancels its request, a line that is closed all of its own
    GET  /v1/models

The server runs on the event loop of whoever opens a line, and only while one is open; nothing of it is imported before.
"""

import asyncio
import hmac
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field

from whet.config.sections import EndpointSection
from whet.data.messages import Conversation
from whet.endpoint.asked import MODEL, Asked, Rules
from whet.endpoint.refused import Refused
from whet.errors import PluginError
from whet.interfaces.environment import Address

if TYPE_CHECKING:
    from whet.endpoint.server import Server


class Line(Protocol):
    """What stands behind a key."""

    @property
    def rules(self) -> Rules:
        """What its requests may ask for."""
        ...

    async def reply(self, asked: Asked, name: str) -> dict[str, Any]:
        """Answer a request, which is named uniquely, with JSON. Raises `Refused`."""
        ...


@define(eq=False)
class OpenLine:
    """A line with its key and the requests that are under way."""

    line: Line
    secret: str
    _running: "set[asyncio.Task[dict[str, Any]]]" = field(factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    async def reply(self, asked: Asked, name: str) -> dict[str, Any]:
        """Answer a request. Cancelling ends it; so does closing the line, which raises `Refused`."""
        if self._closed:  # while the rest of the request was on its way
            raise Refused(401, "the key is no longer valid", code="invalid_api_key")
        task = asyncio.get_running_loop().create_task(self.line.reply(asked, name))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) and own.cancelling():
                raise
            raise Refused(503, "this key's time is over", code="over") from None
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """End all requests that are under way, and wait until they have ended."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class Listener:
    """Opens lines. To be used from one event loop at a time."""

    def __init__(self, section: EndpointSection | None = None) -> None:
        self._section = section or EndpointSection()
        self._lines: dict[str, OpenLine] = {}
        self._numbers = itertools.count()
        self._server: Server | None = None
        self._changing = asyncio.Lock()
        self.counts = Counter[str]()
        """Requests and refusals: all that is kept of them here."""

    @asynccontextmanager
    async def open(self, line: Line, conversations: Callable[[], tuple[Conversation, ...]]) -> AsyncIterator[Address]:
        """Open a line meanwhile. Raises `PluginError` where the server is not installed, `WhetError` where it may not
        listen.
        """
        number, open_ = str(next(self._numbers)), OpenLine(line, secrets.token_urlsafe(32))
        async with self._changing:
            self._server = server = self._server or await self._started()
            self._lines[number] = open_
        try:
            yield Address(server.base_url, f"{number}.{open_.secret}", MODEL, conversations)
        finally:
            del self._lines[number]
            try:
                await open_.close()
            finally:
                await self._close_unless_used(server)

    def find(self, key: str) -> OpenLine | None:
        """Find what a key stands for, in a time that says nothing of how much of it is right."""
        number, _, secret = key.partition(".")
        open_ = self._lines.get(number)
        wanted = open_.secret if open_ else secrets.token_urlsafe(32)
        return open_ if hmac.compare_digest(wanted.encode(), secret.encode(errors="replace")) else None

    async def _close_unless_used(self, server: "Server") -> None:
        async with self._changing:
            if not self._lines and self._server is server:
                self._server = None
                await server.close()

    async def _started(self) -> "Server":
        try:
            from whet.endpoint.server import Server
        except ModuleNotFoundError as error:
            raise PluginError(
                f"an endpoint needs {error.name}, which is not installed here: pip install 'whet[endpoint]'"
            ) from error
        server = Server(self._section, self.find, self.counts)
        await server.start()
        return server
