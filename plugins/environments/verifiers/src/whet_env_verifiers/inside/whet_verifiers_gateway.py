"""One address for all episodes of this process, which sends each request on to the endpoint of its episode.

verifiers keeps a client for each address until the process ends. So verifiers gets only one address, and each request
names its rollout in the header X-Session-ID.
"""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

KEY = "WHET_VERIFIERS_API_KEY"
"""The environment variable with the key of the gateway. verifiers hides variables of such names from programs."""
_MOST_BYTES = 1 << 30
_SESSION = "X-Session-ID"


class Gateway:
    """The gateway. `targets` maps rollouts to the address and the key of their episode."""

    def __init__(self) -> None:
        self.targets: dict[str, tuple[str, str]] = {}
        self.url = ""
        self._client: ClientSession

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Gateway"]:
        """Serve on a free port of the loopback address until the context ends."""
        os.environ[KEY] = secrets.token_urlsafe(32)
        app = web.Application(client_max_size=_MOST_BYTES, handler_args={"max_field_size": 1 << 16})
        app.router.add_route("*", "/v1/{path:.*}", self._sent_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            limits = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(total=None)}
            async with ClientSession(**limits) as self._client:
                yield self
        finally:
            await runner.cleanup()

    async def _sent_on(self, request: web.Request) -> web.StreamResponse:
        target = self.targets.get(request.headers.get(_SESSION, ""))
        if request.headers.get("Authorization") != f"Bearer {os.environ[KEY]}" or target is None:
            return _refused(401, "the episode of this request is over")
        url, key = target
        headers = {"Authorization": f"Bearer {key}"}
        if "Content-Type" in request.headers:
            headers["Content-Type"] = request.headers["Content-Type"]
        try:
            async with self._client.request(
                request.method, f"{url}/{request.match_info['path']}", headers=headers, data=await request.read()
            ) as reply:
                kind = reply.headers.get("Content-Type", "application/json")
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": kind})
                await response.prepare(request)
                async for piece in reply.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (ClientError, OSError) as error:
            return _refused(503, f"the endpoint of the episode is gone: {type(error).__name__}")


def _refused(status: int, message: str) -> web.Response:
    body: dict[str, Any] = {"error": {"message": message, "type": "whet", "code": None, "param": None}}
    return web.json_response(body, status=status)
