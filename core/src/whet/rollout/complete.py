"""Completes a request even if new weights interrupt it.

A generator may end a completion with `abort` because weights arrived (`rollout.on_weight_update: abort`). Then the
rest is requested with the tokens so far as prompt, and the parts are joined. Each token keeps the logprob and the
version with which it was sampled.

    prompt  aaaa|            first request: aborted after 4 tokens, version 3
    prompt  aaaa bbbbbbb.    the rest: version 4
            3333 4444444     versions ((0, 3), (4, 4))
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from whet.data.randomness import derive_seed
from whet.data.records import Completion, IntArray, Request, Sampling, Stop
from whet.errors import PluginError
from whet.interfaces.generator import Generator, Listener, listener, listening


async def complete(generator: Generator, request: Request, decode: Callable[[IntArray], str]) -> Completion:
    """Return the completion of a request, joined from as many parts as needed.

    The randomness of each part depends on the request and on the part's first token. `decode` turns tokens into text,
    to find stop strings that the generator does not see.
    """
    made = Completion(request.id, np.zeros(0, np.int64), np.zeros(0, np.float32), "abort", ())
    rest = request
    while True:
        with listening(shifted(done := len(made.tokens))):
            part = await generator.generate(rest)
        if not isinstance(part, Completion):
            raise PluginError(f"the generator gave {type(part).__name__} for request {request.id}, wanted a Completion")
        if part.stop != "abort" and not done:
            return part
        if part.stop != "abort" or len(part.tokens):
            made = joined(request, made, part, decode)
            if made.stop != "abort":
                return made
            done = len(made.tokens)
            rest = Request(
                id=f"{request.id}-from-{done}",
                tokens=np.concatenate([request.tokens, made.tokens]),
                sampling=evolve(request.sampling, max_tokens=request.sampling.max_tokens - done),
                seed=derive_seed(request.seed, "rest", done),
            )
        await asyncio.sleep(0)  # a generator that aborts repeatedly must not block the event loop


def shifted(begin: int) -> Listener | None:
    """Return this task's listener, with tokens counted from the first part on: the next part begins at `begin`."""
    to = listener.get()
    if to is None or not begin:
        return to
    return evolve(to, call=lambda progress: to.call(evolve(progress, begin=begin + progress.begin)))


def joined(request: Request, before: Completion, part: Completion, decode: Callable[[IntArray], str]) -> Completion:
    """Return what was made before and the next part as one completion. It ends at the first stop of the request."""
    start = len(before.tokens)
    tokens = np.concatenate([before.tokens, part.tokens])
    versions = [*before.versions, *((start + first, version) for first, version in part.versions)]
    end, stop = _end(tokens, start, part.stop, request.sampling, decode)
    return Completion(
        id=request.id,
        tokens=tokens[:end],
        logprobs=np.concatenate([before.logprobs, part.logprobs])[:end],
        stop=stop,
        versions=tuple(
            (first, version)
            for i, (first, version) in enumerate(versions)
            if first < end and (i == 0 or version != versions[i - 1][1])
        ),
        columns=merged_columns(
            [(len(request.tokens), before), (len(request.tokens) + start, part)], len(request.tokens) + end
        ),
    )


def merged_columns(parts: Iterable[tuple[int, Completion]], length: int) -> dict[str, NDArray[Any]]:
    """Return the columns [length, ...] of a sequence, from its completions and the positions where they begin.

    If two completions recorded the same token, the first record counts. A completion has no record of its last token:
    the model reads that token only for the next completion.
    """
    found, known = dict[str, NDArray[Any]](), dict[str, int]()
    for begin, completion in parts:
        for name, column in completion.columns.items():
            if name not in found:
                fill = np.nan if column.dtype.kind == "f" else -1
                found[name] = np.full((length, *column.shape[1:]), fill, column.dtype)
            first, end = known.get(name, 0), min(begin + len(completion.tokens), length)
            found[name][first:end] = column[first:end]
            known[name] = end - 1
    return found


def _end(
    tokens: IntArray, start: int, stop: Stop, sampling: Sampling, decode: Callable[[IntArray], str]
) -> tuple[int, Stop]:
    """Return the length of a completion whose last part begins at `start` and ended by `stop`, and why it ends.

    A generator sees only the stop strings within its own part, and may abort at the very token that ends a completion.
    Tokens sampled after that token would never have been requested, so the shortened completion is a sample of the
    same distribution.
    """
    longest = max((len(text.encode()) for text in sampling.stop), default=0)  # a token has at least one byte
    across = range(start + 1, min(start + longest + 1, len(tokens))) if start else ()
    for end in (*across, len(tokens)):
        text = decode(tokens[max(0, end - longest - 1) : end])
        if any(s in text for s in sampling.stop) or int(tokens[end - 1]) in sampling.stop_tokens:
            return end, "stop"
    return len(tokens), "length" if stop == "abort" and len(tokens) >= sampling.max_tokens else stop
