"""The model of a run, for whoever asks while it runs: people, and agents beyond episodes. Nothing of it is trained on.

Requests go to the generator beside those of episodes, through the same gate, so evaluations have it for themselves.
Each stands for itself: its messages are tokenised as they come. What was seen and said is kept as tokens, see `Kept`.
"""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from whet.data.files import disk_errors, json_line
from whet.data.randomness import derive_seed
from whet.data.records import Completion, IntArray, Request, Sampling
from whet.endpoint import told
from whet.endpoint.asked import Asked, Rules
from whet.endpoint.calls import answered, check_tools
from whet.endpoint.listener import Listener
from whet.endpoint.refused import Refused
from whet.endpoint.told import Answer
from whet.errors import DataError, InfrastructureError, WhetError, WorkerError
from whet.interfaces.environment import Address
from whet.rollout.complete import complete
from whet.rollout.episode import Chat, with_stop_tokens
from whet.rollout.gate import Gate
from whet.rollout.recorded import checked_completion
from whet.run.run_folder import RunFolder
from whet.runtime.event_loop import EpisodeLoop, gather_or_cancel

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.interfaces.generator import Generator

ADDRESS, ROWS = "endpoint.json", "endpoint.jsonl"
"""Files of the run folder: where to ask and with which key, while it is open; and what was said."""


class Kept:
    """Writes a row for each answer to the run folder, up to a size; what comes later is counted."""

    def __init__(self, folder: RunFolder, limit: int) -> None:
        """`limit` is in bytes; 0: nothing is written."""
        self._folder, self._limit = folder, limit
        file = folder.path / ROWS
        self._size = file.stat().st_size if file.exists() else 0
        self._writer = ThreadPoolExecutor(1, "whet endpoint")
        self.counts = Counter[str]()
        """Answers that are there, and that were left out."""

    async def add(self, request: Request, answer: Answer) -> None:
        """Write what the generator was asked and what it answered; done when it is written."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._add, request, answer)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()

    def _add(self, request: Request, answer: Answer) -> None:
        row = _row(request, answer)
        size = len(json_line(row).encode())
        if self._size + size > self._limit:
            self.counts["left_out"] += 1
            return
        self._folder.append(ROWS, [row])
        self._size += size
        self.counts["recorded"] += 1


def _row(request: Request, answer: Answer) -> dict[str, Any]:
    completion, sampling = answer.completion, request.sampling
    return {
        "time": round(time.time(), 3),
        "id": request.id,
        "sampling": {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k")},
        "prompt_token_ids": request.tokens.tolist(),
        "token_ids": completion.tokens.tolist(),
        "logprobs": completion.logprobs.astype(str).astype(float).tolist(),
        "weight_versions": [[int(first), int(version)] for first, version in completion.versions],
        "stop": completion.stop,
    }


class RunLine:
    """Has requests served by a generator. See `whet.endpoint.listener.Line`."""

    def __init__(
        self, generator: "Generator", chat: Chat, gate: Gate, sampling: Sampling, max_context: int, seed: int,
        kept: Kept,
    ) -> None:  # fmt: skip
        """Serve. `sampling` has the chat's stop tokens; its `max_tokens` is the most that is answered."""
        self._generator, self._chat, self._gate, self._kept = generator, chat, gate, kept
        self._max_context, self._seed = max_context, seed
        self._numbers = itertools.count()
        self.rules = Rules(sampling, fixed=False)

    async def reply(self, asked: Asked, name: str) -> dict[str, Any]:
        """Answer a request, and keep it."""
        return told.reply(asked, name, await self._answers(asked, name), self._chat.pieces)

    async def _answers(self, asked: Asked, name: str) -> list[Answer]:
        check_tools(asked, self._chat)
        tokens, number = self._tokens(asked), next(self._numbers)
        room = self._max_context - len(tokens) if self._max_context else asked.sampling.max_tokens
        if room < 1:
            message = f"a prompt of {len(tokens)} tokens leaves no room for an answer in {self._max_context}"
            raise Refused(400, message, "messages", "context_length_exceeded")
        sampling = evolve(asked.sampling, max_tokens=min(room, asked.sampling.max_tokens))
        drawn = ("endpoint", number) if asked.seed is None else ("endpoint as asked", asked.seed)
        requests = [
            Request(f"endpoint-{name}-{i}", tokens, sampling, derive_seed(self._seed, *drawn, i), name)
            for i in range(asked.count)
        ]
        completions = await gather_or_cancel(self._completion(request) for request in requests)
        answers = [answered(asked, self._chat, tokens, completion) for completion in completions]
        for request, answer in zip(requests, answers, strict=True):
            await self._kept.add(request, answer)
        return answers

    async def _completion(self, request: Request) -> Completion:
        try:
            async with self._gate:
                completion = await complete(self._generator, request, self._chat.decode)
        except (WorkerError, InfrastructureError) as error:
            raise Refused(503, "the model cannot answer now", code="model_failed") from error
        except WhetError as error:  # it cannot be served, as with a token that the model does not have
            raise Refused(400, str(error)) from error
        return checked_completion(completion, request)

    def _tokens(self, asked: Asked) -> IntArray:
        prompt = asked.prompt
        if isinstance(prompt, np.ndarray):
            return prompt
        if isinstance(prompt, str):
            return self._chat.encode(prompt)
        try:
            return self._chat.with_tools(asked.tools).prompt(prompt)
        except DataError as error:
            raise Refused(400, str(error), "messages") from error


def serve(
    loop: EpisodeLoop, listener: Listener, generator: "Generator", chat: Chat, config: "Config", folder: RunFolder, *,
    gate: Gate | None, max_context: int,
) -> "RunEndpoint":  # fmt: skip
    """Serve the model of a run, as its config says, until that is closed. `gate` is that of its rollouts."""
    rollout, section = config.rollout, config.endpoint
    turn = Sampling(section.max_tokens or rollout.max_tokens, rollout.temperature, stop=tuple(rollout.stop))
    kept = Kept(folder, section.record)
    line = RunLine(
        generator, chat, gate or Gate(), with_stop_tokens(turn, chat), max_context, config.run.seed, kept
    )  # fmt: skip
    endpoint = RunEndpoint(loop, listener, line, kept, folder)
    endpoint.open()
    return endpoint


class RunEndpoint:
    """Serves the model of a run from `open` to `close`, on the loop of its episodes."""

    def __init__(self, loop: EpisodeLoop, listener: Listener, line: RunLine, kept: Kept, folder: RunFolder) -> None:
        self._loop, self._listener, self._line, self._kept, self._folder = loop, listener, line, kept, folder
        self._opened: AsyncExitStack | None = None

    def open(self) -> Address:
        """Open it, and write where it is and its key, for the eyes of this user alone."""
        opened = AsyncExitStack()
        address = self._loop.run(opened.enter_async_context(self._listener.open(self._line, tuple)))
        self._opened = opened
        _write_private(self._folder, {"base_url": address.base_url, "api_key": address.api_key, "model": address.model})
        self._folder.journal("endpoint opened", base_url=address.base_url)
        return address

    def close(self) -> None:
        """Close it, with all that is asked there. Safe to call twice."""
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        (self._folder.path / ADDRESS).unlink(missing_ok=True)
        if self._loop.try_run(opened.aclose()):
            self._kept.close()
        self._folder.journal("endpoint closed", **self._listener.counts, **self._kept.counts)


def _write_private(folder: RunFolder, value: Mapping[str, str]) -> None:
    """Write a file that only this user may read, from its first byte on."""
    file = folder.path / ADDRESS
    with disk_errors(file):
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(json_line(value))
