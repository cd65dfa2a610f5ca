"""The HTTP server of an endpoint; the only module that imports aiohttp.

Nothing of a request is logged. It is read as far as the limits of the config go, and only for those who have a key.
"""

import asyncio
import json
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from whet.config.sections import EndpointSection
from whet.data.bounded import loads
from whet.endpoint import told
from whet.endpoint.asked import MODEL, Asked, Rules, read_chat, read_text
from whet.endpoint.listener import OpenLine
from whet.endpoint.refused import Refused
from whet.errors import WhetError

BODY_SECONDS = 30.0
"""How long a client may take to send a request's body."""
IDLE_SECONDS = 75.0
"""How long a connection may be without a request."""
CLOSE_SECONDS = 1.0
"""How long answers may take to go out when the server closes."""
MOST_VALUES = 1 << 20
"""Of a body; a prompt may be that many tokens."""
READERS: dict[str, Callable[[Any, Rules], Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
}


class Server:
    """Listens while it is open."""

    def __init__(
        self, section: EndpointSection, find: Callable[[str], OpenLine | None], counts: Counter[str]
    ) -> None:  # fmt: skip
        self._section, self._find, self._counts = section, find, counts
        self._silent = logging.Logger("whet endpoint", logging.CRITICAL + 1)
        self._http = web.Server(
            self._handle, handler_cancellation=True, access_log=None, logger=self._silent, auto_decompress=False,
            keepalive_timeout=IDLE_SECONDS,
        )  # fmt: skip
        self._listening: asyncio.Server | None = None
        self.base_url = ""
        """As clients want it, e.g. `http://127.0.0.1:41234/v1`."""

    async def start(self) -> None:
        """Listen. Raises `WhetError` where that is not possible."""
        host, port = self._section.host, self._section.port
        try:
            self._listening = await asyncio.get_running_loop().create_server(self._connection, host, port)
        except (OSError, UnicodeError) as error:  # a name that is none cannot be encoded
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
        self._http.pre_shutdown()  # connections without a request are not waited for
        await self._http.shutdown(CLOSE_SECONDS)

    def _connection(self) -> asyncio.BaseProtocol:
        if len(self._http.connections) >= self._section.max_connections:
            self._counts["connections refused"] += 1
            return _Full()
        protocol: asyncio.BaseProtocol = self._http()
        return protocol

    async def _handle(self, request: Any) -> Any:
        self._counts["requests"] += 1
        try:
            return await self._answer(request)
        except Refused as refused:
            self._counts[f"refused with {refused.status}"] += 1
            return _refusal(refused)
        except Exception:  # the edge: whoever asks learns nothing of what went wrong within
            self._counts["failed"] += 1
            return _refusal(Refused(500, "this cannot be answered, and should have been"))

    async def _answer(self, request: Any) -> Any:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        open_ = self._find(key.strip()) if kind.lower() == "bearer" else None
        if open_ is None:
            raise Refused(401, "the key is not valid, or no longer", code="invalid_api_key")
        path = request.path.rstrip("/")
        wanted = "POST" if path in READERS else "GET"
        if path not in (*READERS, "/v1/models", f"/v1/models/{MODEL}"):
            raise Refused(404, f"there are {', '.join(READERS)} and /v1/models alone", code="not_found")
        if request.method != wanted:
            raise Refused(405, f"the method is {request.method:.20}, wanted {wanted}", code="method_not_allowed")
        if path not in READERS:
            return web.json_response(told.models() if path == "/v1/models" else told.model())
        asked = READERS[path](await self._body(request), open_.line.rules)
        whole = await open_.reply(asked, secrets.token_hex(12))
        if asked.stream:
            return web.Response(
                body=told.events(asked, whole), content_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        return web.json_response(whole)

    async def _body(self, request: Any) -> Any:
        limit = self._section.max_body
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        read = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.content.iter_chunked(1 << 16):
                    read += chunk
                    if len(read) > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise Refused(408, f"the body was not there after {BODY_SECONDS:g} seconds") from None
        try:
            return loads(read, MOST_VALUES)
        except ValueError as error:
            raise Refused(400, f"the body cannot be read as JSON: {error}") from None


def _refusal(refused: Refused) -> Any:
    # Clients of OpenAI's make a request again where a server failed. Here that could only come too late.
    headers = {"x-should-retry": "false"}
    return web.json_response(told.error(refused), status=refused.status, headers=headers)


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit} bytes (endpoint.max_body)", code="body_too_large")


class _Full(asyncio.Protocol):
    """Sends whoever connects away."""

    def connection_made(self, transport: Any) -> None:
        body = json.dumps(told.error(Refused(503, "there are too many connections (endpoint.max_connections)")))
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        transport.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        transport.close()
