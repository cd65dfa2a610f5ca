"""A generator under test: rules ask it for completions and compare its logprobs with `transformers`."""

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from attrs import field, frozen

from whet.data.records import Completion, Request, Sampling
from whet.interfaces.generator import Generator, Listener, listening
from whet_testing.deadline import deadline
from whet_testing.reference import Reference

T = TypeVar("T")
PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [6, 6], [20, 21, 22, 23])
TOLERANCE = 1e-4
"""Largest allowed difference of a logprob from `transformers`, in nats, in float32."""


@frozen(eq=False)
class Subject:
    """A generator under test with its event loop."""

    generator: Generator
    folder: Path
    tokenizer: Any
    scratch: Path
    deadline_seconds: float
    _runner: asyncio.Runner
    _ids: Iterator[int] = field(factory=itertools.count, init=False)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the generator, and return its result."""
        with deadline(self.deadline_seconds, "what the generator was asked"):
            return self._runner.run(coroutine)

    def request(self, tokens: Any = PROMPTS[0], seed: int = 0, prefix: str = "", **sampling: Any) -> Request:
        """Return a request with a fresh id."""
        settings = Sampling(**{"max_tokens": 8, **sampling})
        return Request(f"request-{next(self._ids)}", np.asarray(tokens, np.int64), settings, seed, prefix)

    def ask(self, *requests: Request) -> list[Completion]:
        """Send all requests in one turn of the event loop, and return their completions."""

        async def together() -> list[Completion]:
            return await asyncio.gather(*map(self.generator.generate, requests))

        return self.run(together())

    def heard(self, request: Request, listener: Listener) -> Completion:
        """Send a request whose tokens a listener hears, and return its completion."""

        async def listened() -> Completion:
            with listening(listener):
                return await self.generator.generate(request)

        return self.run(listened())

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def gap(reference: Reference, request: Request, completion: Completion, temperature: float) -> float:
    """Return the largest difference, in nats, between the completion's logprobs and those of a full forward pass."""
    expected = reference.logprobs(np.concatenate([request.tokens, completion.tokens]), temperature)
    return float(np.abs(expected[len(request.tokens) :] - completion.logprobs).max())
