"""The HTTP server of all endpoints; the only module that imports aiohttp.

No content of a request is logged. A body is read only with a valid key, and up to the limits of the config. Agents of
NeMo Gym can send a key in the body alone, so few bodies without a key elsewhere are read at a time.
"""

import asyncio
import json
import logging
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web
from attrs import evolve

from whet.config.sections import EndpointSection
from whet.data.bounded import loads
from whet.errors import WhetError
from whet_endpoint.anthropic_messages import MessagesDialect
from whet_endpoint.chat import ChatDialect, TextDialect, model, models, openai_error
from whet_endpoint.choices import cut_short
from whet_endpoint.dialects import Dialect
from whet_endpoint.errors import ApiError, failed_inside
from whet_endpoint.requests import MODEL, ApiRequest
from whet_endpoint.responses import ResponsesDialect
from whet_endpoint.session import CLOSE_SECONDS, Session
from whet_endpoint.stream_response import events

BODY_SECONDS = 30.0
"""How long a client may take to send a request's body."""
IDLE_SECONDS = 75.0
"""How long a connection may be without a request."""
SEND_SECONDS = 60.0
"""How long a client may take to read on."""
EVENTS = "text/event-stream; charset=utf-8"
MOST_VALUES = 1 << 20
"""Most JSON values in a body; a prompt may have as many tokens."""
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatDialect(),
    "/v1/completions": TextDialect(),
    "/v1/responses": ResponsesDialect(),
    "/v1/messages": MessagesDialect(),
}
ROLLOUT = re.compile(r"/ng-rollout/([^/]+)(?:/training-token-capture)?(/v1/.*)")
"""A path of NeMo Gym, whose agents send no key: the key stands in the place of the rollout's id."""
KEY = "whet_key"
"""The entry with the key in the `metadata` of a request of NeMo Gym's agents, which pass a record's metadata on."""
MOST_WITHOUT_KEY = 8
"""Most bodies that are read at a time before their key is known."""


class Server:
    """Listens from `start` to `close`."""

    def __init__(
        self, section: EndpointSection, find: Callable[[str], Session | None], counts: Counter[str]
    ) -> None:  # fmt: skip
        self._section, self._find, self._counts = section, find, counts
        self._silent = logging.Logger("whet endpoint", logging.CRITICAL + 1)
        self._http = web.Server(
            self._handle, handler_cancellation=True, access_log=None, logger=self._silent, auto_decompress=False,
            keepalive_timeout=IDLE_SECONDS,
        )  # fmt: skip
        self._listening: asyncio.Server | None = None
        self._without_key = asyncio.Semaphore(MOST_WITHOUT_KEY)
        self.base_url = ""
        """The address for clients, e.g. `http://127.0.0.1:41234/v1`."""

    async def start(self) -> None:
        """Listen. Raises `WhetError` where the address cannot be listened at."""
        host, port = self._section.host, self._section.port
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except (OSError, UnicodeError) as error:  # of a host that is no name
            reason = getattr(error, "strerror", None) or str(error)
            raise WhetError(
                f"endpoint.host {host}, endpoint.port {port} cannot be listened at: {reason}; choose another, or the "
                "port 0 for one that is free"
            ) from error
        listening = self._listening.sockets[0]
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        name = f"[{own}]" if listening.family == socket.AF_INET6 and ":" in own else own
        self.base_url = f"http://{name}:{listening.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Close all connections."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._http.pre_shutdown()  # closes idle connections at once
        await self._http.shutdown(CLOSE_SECONDS)

    def _connection(self) -> asyncio.BaseProtocol:
        if len(self._http.connections) >= self._section.max_connections:
            self._counts["connections refused"] += 1
            return _Full()
        protocol: asyncio.BaseProtocol = self._http()
        return protocol

    async def _handle(self, request: Any) -> Any:
        """Answer a request, and return the response when its client's system has all of it."""
        self._counts["requests"] += 1
        try:
            response = await self._answer(request)
            async with _sending(request):
                await response.prepare(request)
                await response.write_eof()
        except _UnreadError:
            self._counts["not read"] += 1
            raise
        return response

    async def _answer(self, request: Any) -> Any:
        _, path = _key_and_path(request)
        try:
            return await self._respond(request)
        except _UnreadError:
            raise
        except ApiError as error:
            self._counts[f"refused with {error.status}"] += 1
            return _error(error, path)
        except Exception as error:  # the edge: a client learns nothing of an error inside
            self._counts["failed"] += 1
            return _error(failed_inside(error), path)

    async def _respond(self, request: Any) -> Any:
        key, path = _key_and_path(request)
        gym, body = ROLLOUT.fullmatch(request.path) is not None, None
        if not key and path == "/v1/responses" and request.method == "POST":
            async with self._without_key:
                body = await self._body(request)
            key, gym = _key_in(body), True
        session = self._find(key)
        if session is None:
            raise ApiError(401, "the key is not valid, or no longer", code="invalid_api_key")
        wanted = "POST" if path in DIALECTS else "GET"
        if path not in (*DIALECTS, "/v1/models", f"/v1/models/{MODEL}"):
            raise ApiError(404, f"there are {', '.join(DIALECTS)} and /v1/models alone", code="not_found")
        if request.method != wanted:
            raise ApiError(405, f"the method is {request.method:.20}, wanted {wanted}", code="method_not_allowed")
        if path not in DIALECTS:
            return web.json_response(models() if path == "/v1/models" else model())
        dialect = DIALECTS[path]
        body = await self._body(request) if body is None else body
        try:
            parsed = dialect.read(body, session.responder.rules, session.memory)
        except RecursionError:
            raise ApiError(400, "the body nests too deeply to be read") from None
        if gym:
            parsed = evolve(parsed, show_tokens=True)
        if parsed.ignored:
            self._counts["requests with ignored parameters"] += 1
        headers = {"x-whet-ignored": ", ".join(parsed.ignored)} if parsed.ignored else {}
        name, chat = secrets.token_hex(12), session.responder.chat
        if task := asyncio.current_task():
            session.handle(task)
        if parsed.stream:
            return await self._stream(request, session, parsed, name, dialect, headers)
        try:
            choices = await session.respond(parsed, name)
        except ApiError as error:
            if not gym or error.code != "context_length_exceeded":
                raise
            # An agent of NeMo Gym fails with an error, and has what there is verified after an incomplete response.
            parsed, choices = evolve(parsed, show_tokens=False), [cut_short(name)]
        return web.json_response(dialect.response(parsed, name, choices, chat), headers=headers)

    async def _stream(
        self, request: Any, session: Session, parsed: ApiRequest, name: str, dialect: Dialect,
        headers: Mapping[str, str],
    ) -> Any:  # fmt: skip
        """Send a response as events. The status is sent with the first of them."""
        response = web.StreamResponse(headers={**headers, "Content-Type": EVENTS, "Cache-Control": "no-cache"})
        writer = dialect.writer(parsed, name, session.responder.chat)
        async with aclosing(events(session, parsed, name, writer)) as found:
            async for data in found:
                async with _sending(request):
                    await response.prepare(request)
                    await response.write(data)
        return response

    async def _body(self, request: Any) -> Any:
        limit = self._section.max_body
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # the client waits for it before the body
        read = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.content.iter_chunked(1 << 16):
                    read += chunk
                    if len(read) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise ApiError(408, f"the body was not there after {BODY_SECONDS:g} seconds") from None
        try:
            return loads(read, MOST_VALUES)
        except ValueError as error:
            raise ApiError(400, f"the body cannot be read as JSON: {error}") from None


class _UnreadError(ConnectionError):
    """A client is gone, or does not read its response."""


@asynccontextmanager
async def _sending(request: Any) -> AsyncIterator[None]:
    """Send a part of a response in the body. If the client does not read, break the connection; raise `_UnreadError`.

    Cancelling breaks it too: a connection that is closed in order waits until the client has read what was written.
    """
    transport, sent = request.transport, False
    try:
        async with asyncio.timeout(SEND_SECONDS):
            if transport is not None:
                transport.set_write_buffer_limits(0)  # written is what the system has taken over
            yield
        sent = True
    except (TimeoutError, ConnectionError) as error:
        raise _UnreadError from error
    finally:
        if transport is not None and not sent:
            transport.abort()


def _key_and_path(request: Any) -> tuple[str, str]:
    """Return the key of a request, and its path without the prefix of NeMo Gym."""
    path, key = request.path.rstrip("/"), request.headers.get("x-api-key", "")
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        key = bearer.strip()
    if found := ROLLOUT.fullmatch(path):
        key, path = found[1], found[2]
    return key, path


def _key_in(body: Any) -> str:
    """Return the key in the metadata of a body. Empty: it has none."""
    metadata = body.get("metadata") if isinstance(body, dict) else None
    key = metadata.get(KEY) if isinstance(metadata, dict) else None
    return key if isinstance(key, str) else ""


def _error(error: ApiError, path: str) -> Any:
    # Clients repeat a request after a server's error. Here a repeated request would come too late.
    headers = {"x-should-retry": "false"}
    found = DIALECTS[path].error(error) if path in DIALECTS else openai_error(error)
    return web.json_response(found, status=error.status, headers=headers)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (endpoint.max_body)", code="body_too_large")


class _Full(asyncio.Protocol):
    """Refuses a connection with status 503."""

    def connection_made(self, transport: Any) -> None:
        body = json.dumps(openai_error(ApiError(503, "there are too many connections (endpoint.max_connections)")))
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        transport.close()
