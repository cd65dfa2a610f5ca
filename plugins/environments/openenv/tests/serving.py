"""An OpenEnv server on the loopback address: a number to find, and what servers do wrong."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web

from whet_testing.http_server import served

NUMBER: dict[str, Any] = {
    "title": "Guess",
    "type": "object",
    "additionalProperties": False,
    "required": ["number"],
    "properties": {
        "metadata": {"type": "object"},
        "number": {"type": "integer", "description": "a guess from 0 to 9"},
    },
}


class GuessServer:
    """A server of `{"number": N}`: the number to find is the seed modulo 10. `trouble` is what it does wrong, if
    anything, to each step, or `on` each reset; with `times` only to the first ones.
    """

    def __init__(self, trouble: str = "", times: int = 1_000_000, on: str = "step", most: int = 64) -> None:
        self.trouble, self.times, self.on, self.most = trouble, times, on, most
        self.schema: Any = NUMBER
        self.seen: list[dict[str, Any]] = []
        """Every message, in order."""
        self.open = self.peak = self.sessions = 0
        self.headers: list[str] = []
        self.changed = threading.Condition()
        self.url = ""

    def wait_until_nobody_is_connected(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.open, 30)

    async def _schema(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization", ""))
        return web.json_response({"action": self.schema, "observation": {}, "state": {}})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        self.headers.append(request.headers.get("Authorization", ""))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._count(1)
        try:
            if self.open > self.most:
                await socket.send_str(_error("CAPACITY_REACHED", "all sessions are taken"))
                return socket
            await self._play(socket)
        finally:
            self._count(-1)
        return socket

    def _count(self, change: int) -> None:
        with self.changed:
            self.open += change
            self.peak = max(self.peak, self.open)
            self.sessions += max(change, 0)
            self.changed.notify_all()

    async def _play(self, socket: web.WebSocketResponse) -> None:
        secret = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                continue
            asked = json.loads(message.data)
            self.seen.append(asked)
            if asked["type"] == "close":
                break
            if self.trouble and self.times > 0 and asked["type"] == self.on:
                self.times -= 1
                if await self._go_wrong(socket):
                    break
                continue
            if asked["type"] == "reset":
                secret = asked["data"]["seed"] % 10
                await socket.send_str(_observed("A number from 0 to 9.", None, False))
                continue
            number = asked["data"].get("number")
            if not isinstance(number, int) or not 0 <= number <= 9:
                wrong = {"loc": ["number"], "msg": f"{number} is not from 0 to 9"}
                await socket.send_str(_error("VALIDATION_ERROR", "Invalid message", errors=[wrong]))
            else:
                far = "right" if number == secret else "too low" if number < secret else "too high"
                await socket.send_str(_observed(far, 1.0 if far == "right" else -0.1, far == "right"))

    async def _go_wrong(self, socket: web.WebSocketResponse) -> bool:
        if self.trouble == "hangs":
            async for _ in socket:  # until the client has gone
                pass
            return True
        if self.trouble == "closes":
            return True
        await socket.send_str(TROUBLES[self.trouble])
        return False


def _observed(text: Any, reward: Any, done: Any) -> str:
    observation = {"feedback": text} if isinstance(text, str) else text
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


def _error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message, **more}})


TROUBLES = {
    "hangs": "",
    "closes": "",
    "sends too much": _observed("x" * 200_000, 1.0, True),
    "sends no JSON": "<html>502</html>",
    "sends a list": "[1]",
    "sends deep JSON": "[" * 100_000,
    "sends a state": json.dumps({"type": "state", "data": {}}),
    "observes a list": _observed([1], 1.0, True),
    "rewards with NaN": _observed("right", float("nan"), True),
    "rewards with infinity": _observed("right", float("inf"), True),
    "rewards with text": _observed("right", "1.0", True),
    "is done with text": _observed("right", 1.0, "no"),
    "fails": _error("EXECUTION_ERROR", "ZeroDivisionError"),
    "sends an error that is no object": json.dumps({"type": "error", "data": "broken"}),
}


@contextmanager
def serving(server: GuessServer) -> Iterator[GuessServer]:
    """Run a server in a thread."""
    with served([web.get("/schema", server._schema), web.get("/ws", server._session)]) as server.url:
        yield server
