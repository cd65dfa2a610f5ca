"""One session of an OpenEnv server: a WebSocket on which the server keeps one environment.

    -> {"type": "reset", "data": {"seed": 3}}        <- {"type": "observation", "data": {"observation": {...},
    -> {"type": "step", "data": {"number": 3}}                                  "reward": 0.0, "done": false}}
    -> {"type": "close"}                             <- {"type": "error", "data": {"code": ..., "message": ...}}

Messages of the server are not trusted: size and time are limited, and the content is checked. An invalid message raises
`InfrastructureError`, so it scores no episode. (The server's routes `/reset` and `/step` cannot be used: each request
gets another environment.)
"""

import asyncio
import json
import math
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from attrs import field, frozen

from whet.errors import ConfigError, InfrastructureError

_SCHEMA_BYTES = 1 << 20


class ActionRefused(Exception):  # noqa: N818 - it says what came of an action
    """The server says that an action is not valid. The message is the server's."""


@frozen
class Server:
    """A server, and how it is talked to."""

    url: str
    token: str = field(repr=False)
    seconds: float
    message_bytes: int

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of each request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def action_schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of actions. Raises `ConfigError` if the server does not answer with one."""
        url = f"{self.url.rstrip('/')}/schema"
        try:
            request = urllib.request.Request(url, headers=self.headers)
            with urllib.request.urlopen(request, timeout=self.seconds) as reply:
                found = json.loads(reply.read(_SCHEMA_BYTES))["action"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"openenv.url: {url} has no schema of actions ({type(error).__name__}: {error}); start the OpenEnv "
                "server, or correct the address"
            ) from error
        if not isinstance(found, Mapping):
            raise ConfigError(f"openenv.url: the schema of actions of {url} is {found!r:.80}, wanted an object")
        return found

    @asynccontextmanager
    async def session(self) -> AsyncIterator["Session"]:
        """Open a session, and close it in the end. Raises `InfrastructureError`."""
        url = f"{self.url.rstrip('/')}/ws"
        limit = aiohttp.ClientTimeout(total=None, connect=self.seconds)
        async with aiohttp.ClientSession(headers=self.headers, timeout=limit) as client:
            try:
                async with asyncio.timeout(self.seconds):
                    socket = await client.ws_connect(url, max_msg_size=self.message_bytes, autoclose=True)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                raise InfrastructureError(f"OpenEnv server {url}: no session: {_words(error)}") from error
            try:
                yield Session(socket, self)
            finally:
                try:
                    async with asyncio.timeout(min(self.seconds, 5)):
                        await socket.send_str('{"type": "close"}')
                        await socket.close()
                except (TimeoutError, aiohttp.ClientError, OSError):
                    pass  # the transport is closed with the client


@frozen
class Observation:
    """What the server answers to a reset or a step."""

    observation: Mapping[str, Any]
    reward: float
    """0 where the server gives none."""
    done: bool


class Session:
    """An open session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, server: Server) -> None:
        self._socket, self._server = socket, server

    async def reset(self, arguments: Mapping[str, Any]) -> Observation:
        """Reset the environment. Raises `InfrastructureError`."""
        try:
            return await self._asked("reset", arguments)
        except ActionRefused as error:
            raise self._wrong(f"refuses to be reset with {dict(arguments)!r:.200}: {error}") from error

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Take an action. Raises `ActionRefused` if the action is not valid, and `InfrastructureError`."""
        return await self._asked("step", action)

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Observation:
        try:
            async with asyncio.timeout(self._server.seconds):
                await self._socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
                message = await self._socket.receive()
        except TimeoutError as error:
            raise self._wrong(f"did not answer a {kind} within {self._server.seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._wrong(f"was lost in a {kind}: {_words(error)}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            code = self._socket.close_code
            too_long = code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            reason = f"sent more than {self._server.message_bytes} bytes" if too_long else f"ended the session ({code})"
            raise self._wrong(f"{reason} in a {kind}")
        return self._read(kind, message.data)

    def _read(self, kind: str, text: str) -> Observation:
        try:
            answer = json.loads(text)
            found, data = answer["type"], answer["data"]
            if found == "error":
                if data.get("code") == "VALIDATION_ERROR":
                    raise ActionRefused(_reasons(data))
                raise self._wrong(f"answers a {kind} with {data.get('code')!s:.40}: {data.get('message')!s:.300}")
            observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._wrong(f"answers a {kind} with {text!r:.120}, wanted an observation") from error
        reward = 0.0 if reward is None else reward
        if found != "observation" or not isinstance(observation, Mapping):
            raise self._wrong(f"answers a {kind} with {text!r:.120}, wanted an observation")
        if not isinstance(reward, int | float) or not math.isfinite(reward) or not isinstance(done, bool):
            raise self._wrong(f"answers a {kind} with the reward {reward!r:.40} and done {done!r:.40}")
        return Observation(observation, float(reward), done)

    def _wrong(self, what: str) -> InfrastructureError:
        return InfrastructureError(f"OpenEnv server {self._server.url} {what}")


def _reasons(data: Mapping[str, Any]) -> str:
    """Return why an action is not valid: for each field what is wrong with it, where the server states it."""
    found = data.get("errors")
    listed = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    fields = [(".".join(map(str, one.get("loc") or ())), one.get("msg")) for one in listed[:4]]
    return "; ".join(f"{place}: {text}" if place else str(text) for place, text in fields) or str(data.get("message"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
