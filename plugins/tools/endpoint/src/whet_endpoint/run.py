"""The endpoint of a run: people, and agents outside of episodes, ask the model while it trains.

Requests go to the generator beside those of episodes and through the same gate, so an evaluation has the generator for
itself. Each request stands alone: its messages are tokenised as they come. Nothing of it is trained on.
"""

import asyncio
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

import numpy as np
from attrs import evolve

from whet.data.files import disk_errors, json_line
from whet.data.randomness import derive_seed
from whet.data.records import Completion, IntArray, Request
from whet.errors import DataError, InfrastructureError, WhetError, WorkerError
from whet.interfaces.chat import Chat
from whet.interfaces.endpoint import Loop, RunFiles
from whet.interfaces.environment import Address
from whet.interfaces.generator import Generator
from whet.rollout.complete import complete
from whet.rollout.event_loop import gather_or_cancel
from whet.rollout.recorded import checked_completion
from whet_endpoint.choices import Choice
from whet_endpoint.episode import heard
from whet_endpoint.errors import ApiError
from whet_endpoint.listener import Listener
from whet_endpoint.reading import check_tools, read_choice, text_prompt
from whet_endpoint.requests import ApiRequest, Rules
from whet_endpoint.rows import RowWriter
from whet_endpoint.session import Listen

ADDRESS = "endpoint.json"
"""The file of the run folder with the address and its key, while the endpoint is open."""


class RunResponder:
    """Responds by a generator. Obeys `whet_endpoint.session.Responder`."""

    def __init__(
        self, generator: Generator, chat: Chat, gate: AbstractAsyncContextManager[None], rules: Rules,
        max_context: int, seed: int, rows: RowWriter | None, failed: Callable[[WorkerError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """The sampling of `rules` has the chat's stop tokens. `rows`: None records nothing. `failed` gets errors of the
        generator's workers, which end all requests.
        """
        self._failed = failed
        self._generator, self.chat, self._gate, self._rows = generator, chat, gate, rows
        self._max_context, self._seed = max_context, seed
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(thread_name_prefix="whet endpoint prompts")
        self.rules = rules

    async def respond(self, request: ApiRequest, name: str, listen: Listen | None) -> list[Choice]:
        """Return the response to a request, and record it."""
        check_tools(request, self.chat)
        number = next(self._numbers)
        # A long prompt takes seconds, and others share the loop. Of the loop's own threads, those who wait for this
        # response may hold all.
        tokens = await asyncio.get_running_loop().run_in_executor(self._threads, self._tokens, request)
        room = self._max_context - len(tokens) if self._max_context else request.sampling.max_tokens
        if room < 1:
            message = f"a prompt of {len(tokens)} tokens leaves no room for a response in {self._max_context}"
            raise ApiError(400, message, "messages", "context_length_exceeded")
        sampling = evolve(request.sampling, max_tokens=min(room, request.sampling.max_tokens))
        drawn = ("endpoint", number) if request.seed is None else ("endpoint as asked", request.seed)
        wanted = [
            Request(f"endpoint-{name}-{i}", tokens, sampling, derive_seed(self._seed, *drawn, i), name)
            for i in range(request.count)
        ]
        completions = await gather_or_cancel(
            heard(partial(self._completion, one), request, i, listen) for i, one in enumerate(wanted)
        )
        choices = [read_choice(request, self.chat, tokens, completion) for completion in completions]
        for one, choice in zip(wanted, choices, strict=True) if self._rows else ():
            assert self._rows is not None
            await self._rows.add(one, choice)
        return choices

    def close(self) -> None:
        """End the threads once the prompts that they tokenise are done, which are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _completion(self, request: Request) -> Completion:
        try:
            async with self._gate:
                completion = await complete(self._generator, request, self.chat.decode)
        except (WorkerError, InfrastructureError) as error:
            if isinstance(error, WorkerError):
                self._failed(error)
            raise ApiError(503, "the model cannot answer now", code="model_failed") from error
        except WhetError as error:  # the generator refuses it, e.g. for a token that the model does not have
            raise ApiError(400, str(error)) from error
        return checked_completion(completion, request)

    def _tokens(self, request: ApiRequest) -> IntArray:
        prompt = request.prompt
        if isinstance(prompt, np.ndarray):
            return prompt
        if isinstance(prompt, str):
            return text_prompt(self.chat, prompt)
        try:
            return self.chat.with_tools(request.tools).prompt(prompt)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error


class RunEndpoint:
    """Serves the model of a run from `open` to `close`, on the event loop of its episodes."""

    def __init__(
        self, loop: Loop, listener: Listener, responder: RunResponder, rows: RowWriter, folder: RunFiles
    ) -> None:
        self._loop, self._listener, self._responder, self._rows, self._folder = loop, listener, responder, rows, folder
        self._opened: AsyncExitStack | None = None

    def open(self) -> Address:
        """Open the endpoint, and write its address and key to a file that only this user may read."""
        opened = AsyncExitStack()
        address = self._loop.run(opened.enter_async_context(self._listener.open(self._responder, tuple)))
        self._opened = opened
        write_address(self._folder.path / ADDRESS, address)
        self._folder.journal("endpoint opened", base_url=address.base_url)
        return address

    def close(self) -> None:
        """Close the endpoint and cancel its requests. Safe to call twice."""
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        (self._folder.path / ADDRESS).unlink(missing_ok=True)
        if self._loop.try_run(opened.aclose()):
            self._rows.close()
        self._responder.close()
        self._folder.journal("endpoint closed", **self._listener.counts, **self._rows.counts)


def write_address(file: Path, address: Address) -> None:
    """Write an address and its key as JSON, for this user alone from the first byte on."""
    value = {"base_url": address.base_url, "api_key": address.api_key, "model": address.model}
    with disk_errors(file):
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(json_line(value))
