"""A session: what one key gives access to, and the requests in flight with that key."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from attrs import define, evolve, field

from whet.data.records import Progress
from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice, Collected
from whet_endpoint.errors import ApiError
from whet_endpoint.memory import Memory, response_id
from whet_endpoint.requests import ApiRequest, Rules

CLOSE_SECONDS = 1.0
"""How long the sending of responses may take when their key ends, and when the server closes."""
Listen = Callable[[int, Progress], None]
"""(index of the choice, its next tokens). Called while a response is sampled, where the generator reports tokens."""


class Responder(Protocol):
    """Responds to the requests of one key: an episode, or the model of a run."""

    @property
    def rules(self) -> Rules:
        """Return what requests may ask for."""

    @property
    def chat(self) -> Chat:
        """Return the tokenizer of the model."""

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        """Return the choices of a response. `name` is unique. Raises `ApiError`."""


@define(eq=False)
class Session:
    """A responder with its key, its earlier responses, and the requests in flight."""

    responder: Responder
    secret: str
    memory: Memory = field(factory=Memory, init=False)
    _running: "set[asyncio.Task[list[Choice]]]" = field(factory=set, init=False)
    _handlers: "set[asyncio.Task[Any]]" = field(factory=set, init=False)
    """The tasks that answer requests: each waits for its sampling, and then for its client to read."""
    _closed: bool = field(default=False, init=False)

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None = None) -> list[Choice]:
        """Return the response to a request. Cancelling ends it; so does closing the session, with an `ApiError`."""
        if self._closed:  # while the rest of the request was on its way
            raise ApiError(401, "the key is no longer valid", code="invalid_api_key")
        task = asyncio.get_running_loop().create_task(self._choices(request, name, listen))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) and own.cancelling():
                raise
            raise ApiError(503, "this key's time is over", code="over") from None
        finally:
            self._running.discard(task)

    def handle(self, task: "asyncio.Task[Any]") -> None:
        """Keep a task that answers a request, to end it with the session."""
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)

    async def close(self) -> None:
        """Cancel all requests in flight, and wait until they have ended. Clients that read are told so."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if handlers := list(self._handlers):
            _, unread = await asyncio.wait(handlers, timeout=CLOSE_SECONDS)
            for handler in unread:
                handler.cancel()
            if unread:
                await asyncio.wait(unread, timeout=CLOSE_SECONDS)

    async def _choices(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        """Return the choices, and keep the conversation where a later request may continue it by the response's id."""
        choices = await self._with_likeliest(request, name, listen)
        if request.kept:
            self.memory.keep(response_id(name), (*request.history, choices[0].message))
        return choices

    async def _with_likeliest(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        """Return the choices, with the likeliest tokens where they are wanted."""
        if not request.likeliest:
            return await self.responder.respond(request, name, listen)
        collected = [Collected() for _ in range(request.count)]

        def collect(index: int, progress: Progress) -> None:
            collected[index].add(progress)
            if listen is not None:
                listen(index, progress)

        choices = await self.responder.respond(request, name, collect)
        return [
            evolve(choice, likeliest=found.of(choice.completion))
            for choice, found in zip(choices, collected, strict=True)
        ]
