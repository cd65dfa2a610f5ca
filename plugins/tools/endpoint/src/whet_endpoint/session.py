"""A session: what one key gives access to, and the requests in flight with that key."""

import asyncio
from typing import Any, Protocol

from attrs import define, field

from whet_endpoint.errors import ApiError
from whet_endpoint.requests import ApiRequest, Rules


class Responder(Protocol):
    """Responds to the requests of one key: an episode, or the model of a run."""

    @property
    def rules(self) -> Rules:
        """What requests may ask for."""
        ...

    async def respond(self, request: ApiRequest, name: str) -> dict[str, Any]:
        """Return the response to a request as JSON. `name` is unique. Raises `ApiError`."""
        ...


@define(eq=False)
class Session:
    """A responder with its key and the requests in flight."""

    responder: Responder
    secret: str
    _running: "set[asyncio.Task[dict[str, Any]]]" = field(factory=set, init=False)
    _closed: bool = field(default=False, init=False)

    async def respond(self, request: ApiRequest, name: str) -> dict[str, Any]:
        """Return the response to a request. Cancelling ends it; so does closing the session, with an `ApiError`."""
        if self._closed:  # while the rest of the request was on its way
            raise ApiError(401, "the key is no longer valid", code="invalid_api_key")
        task = asyncio.get_running_loop().create_task(self.responder.respond(request, name))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) and own.cancelling():
                raise
            raise ApiError(503, "this key's time is over", code="over") from None
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """Cancel all requests in flight, and wait until they have ended."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
