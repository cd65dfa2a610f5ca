"""The address of all endpoints: one HTTP server, and a fresh key for each endpoint.

    key -> session -> responder -> choices -> dialect -> response

A client that disconnects cancels its request. A session that ends cancels all requests with its key. The server runs on
the event loop that opens the first session, and closes with the last one.
"""

import asyncio
import hmac
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from whet.config.sections import EndpointSection
from whet.data.messages import Conversation
from whet.interfaces.environment import Address
from whet_endpoint.requests import MODEL
from whet_endpoint.server import Server
from whet_endpoint.session import Responder, Session


class Listener:
    """Opens sessions. Used from one event loop at a time."""

    def __init__(self, section: EndpointSection) -> None:
        self._section = section
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count()
        self._server: Server | None = None
        self._changing = asyncio.Lock()
        self.counts = Counter[str]()
        """Requests and errors by status: all that is kept of requests here."""

    @asynccontextmanager
    async def open(
        self, responder: Responder, conversations: Callable[[], tuple[Conversation, ...]]
    ) -> AsyncIterator[Address]:
        """Open a session until the context ends. Raises `WhetError` where the server may not listen."""
        number, session = str(next(self._numbers)), Session(responder, secrets.token_urlsafe(32))
        async with self._changing:
            self._server = server = self._server or await self._started()
            self._sessions[number] = session
        try:
            yield Address(server.base_url, f"{number}.{session.secret}", MODEL, conversations)
        finally:
            del self._sessions[number]
            try:
                await session.close()
            finally:
                await self._close_unless_used(server)

    def find(self, key: str) -> Session | None:
        """Return the session of a key. How long it takes does not depend on how much of a wrong key is right."""
        number, _, secret = key.partition(".")
        session = self._sessions.get(number)
        wanted = session.secret if session else secrets.token_urlsafe(32)
        return session if hmac.compare_digest(wanted.encode(), secret.encode(errors="replace")) else None

    async def _close_unless_used(self, server: Server) -> None:
        async with self._changing:
            if not self._sessions and self._server is server:
                self._server = None
                await server.close()

    async def _started(self) -> Server:
        server = Server(self._section, self.find, self.counts)
        await server.start()
        return server
