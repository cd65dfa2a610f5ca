"""Servers of NeMo Gym over HTTP. An episode with a resources server is a session, which a cookie names.

    POST /seed_session    the record                    -> Set-Cookie
    POST /TOOL            the arguments, Cookie         -> the tool's answer, any JSON, any status
    POST /verify          record + response, Cookie     -> the same + "reward"

The server states the cookie anew in each answer, so the last one is sent. An agent server plays a whole episode, with a
resources server of its own:

    POST /run             the record                    -> record + response + "reward"

Messages of a server are not trusted: size and time are limited, and the content is checked. An invalid message raises
`InfrastructureError`, so it scores no episode.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from attrs import field, frozen

from whet.errors import EpisodeError, InfrastructureError


@frozen
class Server:
    """A server, and how it is talked to."""

    url: str
    token: str = field(repr=False)
    seconds: float
    reply_bytes: int

    @asynccontextmanager
    async def session(self, record: Mapping[str, Any]) -> AsyncIterator["Session"]:
        """Open a session for a record.

        Raises `EpisodeError` if the server does not take the record, and `InfrastructureError`.
        """
        async with self._opened() as session:
            await session.record_taken("seed_session", record)
            yield session

    async def played(self, record: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward of an episode that an agent server plays, and its components.

        Raises `EpisodeError` if the server does not take the record, and `InfrastructureError`.
        """
        async with self._opened() as session:
            return session.scored("run", await session.record_taken("run", record))

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator["Session"]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        jar = aiohttp.CookieJar(unsafe=True)  # also of servers that are named by numbers
        limit = aiohttp.ClientTimeout()  # `seconds` is the deadline, which aiohttp's own of five minutes may cut short
        async with aiohttp.ClientSession(headers=headers, cookie_jar=jar, timeout=limit) as client:
            yield Session(client, self)


class Session:
    """An open session."""

    def __init__(self, client: aiohttp.ClientSession, server: Server) -> None:
        self._client, self._server = client, server

    async def tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a tool's answer as text. A status that is an error is an answer, too. Raises `InfrastructureError`."""
        _, text = await self.posted(name, arguments)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, str) else text

    async def verified(self, record: Mapping[str, Any], response: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward of a response, and its components. Raises `InfrastructureError`."""
        status, text = await self.posted("verify", {**record, "response": response})
        if status != 200:
            raise self.wrong("verify", f"status {status}: {text[:300]}")
        return self.scored("verify", text)

    async def record_taken(self, route: str, record: Mapping[str, Any]) -> str:
        """Return the answer to a record. Raises `EpisodeError` if it is not taken, and `InfrastructureError`."""
        status, text = await self.posted(route, record)
        if status == 422:
            raise EpisodeError(f"{self._server.url}/{route} does not take the record: {text[:500]}")
        if status != 200:
            raise self.wrong(route, f"status {status}: {text[:500]}")
        return text

    def scored(self, route: str, text: str) -> tuple[float, dict[str, float]]:
        """Return the reward in an answer, and its components. Raises `InfrastructureError`."""
        try:
            found = json.loads(text)
            reward, components = found["reward"], found.get("reward_components") or {}
            numbers = {str(name): float(value) for name, value in components.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.wrong(route, f"{text[:120]!r}, wanted a `reward`") from error
        if not isinstance(reward, int | float) or not all(map(math.isfinite, (reward, *numbers.values()))):
            raise self.wrong(route, f"the reward {reward!r:.40} with components {numbers!r:.120}")
        return float(reward), numbers

    async def posted(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Return status and text of the answer to a request. Raises `InfrastructureError`."""
        most = self._server.reply_bytes
        try:
            async with (
                asyncio.timeout(self._server.seconds),
                self._client.post(f"{self._server.url.rstrip('/')}/{route}", json=dict(body)) as reply,
            ):
                held = bytearray()
                async for chunk in reply.content.iter_any():
                    held += chunk
                    if len(held) > most:
                        raise self.wrong(route, f"more than {most} bytes")
                return reply.status, held.decode("utf-8", "replace")
        except TimeoutError as error:
            raise self.wrong(route, f"nothing within {self._server.seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.wrong(route, f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def wrong(self, route: str, what: str) -> InfrastructureError:
        """Return the error that names the server and what it answered."""
        return InfrastructureError(f"NeMo Gym server {self._server.url} answers /{route} with {what}")
