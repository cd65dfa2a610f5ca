"""The client of one MCP server, by the official package `mcp`, of version 1 or 2.

A server is a program of the user's, which speaks over stdin and stdout, or listens at a URL.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from mcp import ClientSession
from mcp.client import streamable_http
from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client

from whet.runtime.watchdog import FAMILY
from whet_env_tools.hosted.answer import Answer, Broken

_PING_SECONDS: Final = 5.0
_MOST_PAGES: Final = 64
_MOST_TOOLS: Final = 512
_OF_THE_CALL: Final = (-32600, -32601, -32602, -32603)
"""Codes of JSON-RPC errors with which a server refuses a call. Others are of the server, or of a lost connection."""


@asynccontextmanager
async def connected(server: dict[str, Any]) -> AsyncIterator["McpTools"]:
    """Connect to a server, and yield its tools. A program that was started ends with the block."""
    async with AsyncExitStack() as stack:
        streams = await stack.enter_async_context(_streams(server))
        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        try:
            async with asyncio.timeout(server["start_seconds"]):
                await session.initialize()
                tools = await _tools(session)
        except TimeoutError:
            raise Broken(f"it was not ready within {server['start_seconds']:g} s") from None
        yield McpTools(session, tools)


@asynccontextmanager
async def _streams(server: dict[str, Any]) -> AsyncIterator[Any]:
    if not server["command"]:
        make_client: Any = getattr(streamable_http, "create_mcp_http_client")  # noqa: B009 - not exported to mypy
        headers = {"Authorization": f"Bearer {server['token']}"} if server["token"] else {}
        async with (
            make_client(headers=headers) as client,
            streamable_http.streamable_http_client(server["url"], http_client=client) as streams,
        ):
            yield streams
        return
    program, *arguments = server["command"]
    # its mark lets the watchdog end the program, which leads a session of its own
    environment = {**get_default_environment(), **server["environment"], FAMILY: os.environ.get(FAMILY, "")}
    parameters = StdioServerParameters(command=program, args=arguments, env=environment, cwd=server["folder"])
    async with stdio_client(parameters, errlog=sys.stderr) as streams:
        yield streams


async def _tools(session: ClientSession) -> list[dict[str, Any]]:
    found, cursor = list[dict[str, Any]](), None
    for _ in range(_MOST_PAGES):
        page = await (session.list_tools() if cursor is None else _page(session, cursor))
        for tool in page.tools:
            schema = _either(tool, "input_schema", "inputSchema")
            found.append({"name": tool.name, "description": tool.description or "", "parameters": schema})
        cursor = _either(page, "next_cursor", "nextCursor")
        if not cursor or len(found) > _MOST_TOOLS:
            break
    if len(found) > _MOST_TOOLS:
        raise Broken(f"it lists more than {_MOST_TOOLS} tools")
    return found


def _page(session: ClientSession, cursor: str) -> Any:
    if "params" in inspect.signature(session.list_tools).parameters:
        from mcp.types import PaginatedRequestParams

        return session.list_tools(params=PaginatedRequestParams(cursor=cursor))
    listing: Any = session.list_tools
    return listing(cursor)


class McpTools:
    """The tools of a server."""

    def __init__(self, session: ClientSession, tools: list[dict[str, Any]]) -> None:
        self._session, self._described = session, tools

    def described(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each tool, as the server lists them."""
        return [{**tool, "waits": True, "keeps": False} for tool in self._described]

    async def call(self, tool: str, arguments: dict[str, Any], episode: dict[str, Any]) -> Answer:
        """Call a tool. What the server says of a wrong call is an answer, too."""
        try:
            result = await self._session.call_tool(tool, arguments)
        except (asyncio.CancelledError, MemoryError):
            raise
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code in _OF_THE_CALL or (code is not None and await self.recovers(_PING_SECONDS)):
                return Answer(str(error), error=True)
            raise Broken(f"{type(error).__name__}: {error}") from error
        text = "\n".join(_words(part) for part in getattr(result, "content", ()))
        if not text and (structured := _either(result, "structured_content", "structuredContent")) is not None:
            text = json.dumps(structured, ensure_ascii=False)
        return Answer(text, error=bool(_either(result, "is_error", "isError")))

    async def recovers(self, seconds: float) -> bool:
        """Return whether the server answers a ping."""
        try:
            async with asyncio.timeout(min(seconds, _PING_SECONDS)):
                await self._session.send_ping()
        except Exception:  # whatever the client raises: the server is to be started again
            return False
        return True


def _words(part: Any) -> str:
    if isinstance(text := getattr(part, "text", None), str):
        return text
    resource = getattr(part, "resource", None)
    if isinstance(text := getattr(resource, "text", None), str):
        return text
    if uri := getattr(part, "uri", None):
        return str(uri)
    return f"[{getattr(part, 'type', 'a part')} that cannot be shown as text]"


def _either(held: Any, new: str, old: str) -> Any:
    """Return a field by its name in version 2 of the package, or in version 1."""
    return getattr(held, new, None) if hasattr(held, new) else getattr(held, old, None)
