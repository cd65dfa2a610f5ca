"""Completes a request even if new weights interrupt it.

A generator may end a completion with `abort` because weights arrived (`rollout.on_weight_update: abort`). Then the
rest is requested with the tokens so far as prompt, and the parts are joined. Each token keeps the logprob and the
version with which it was sampled.

    prompt  aaaa|            first request: aborted after 4 tokens, version 3
    prompt  aaaa bbbbbbb.    the rest: version 4
            3333 4444444     versions ((0, 3), (4, 4))
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from whet.data.randomness import derive_seed
from whet.data.records import Completion, IntArray, Request
from whet.errors import PluginError
from whet.interfaces.generator import Generator, Listener, listener, listening


async def complete(generator: Generator, request: Request, decode: Callable[[IntArray], str]) -> Completion:
    """Return the completion of a request, joined from as many parts as needed.

    The randomness of each part depends on the request and on the part's first token. `decode` turns tokens into text,
    to find stop strings that begin in one part and end in the next.
    """
    parts: list[Completion] = []
    rest = request
    while True:
        with listening(shifted(sum(len(p.tokens) for p in parts))):
            part = await generator.generate(rest)
        if not isinstance(part, Completion):
            raise PluginError(f"the generator gave {type(part).__name__} for request {request.id}, wanted a Completion")
        if part.stop != "abort":
            return joined(request, [*parts, part], decode) if parts else part
        if len(part.tokens):
            parts.append(part)
            done = sum(len(p.tokens) for p in parts)
            if done >= request.sampling.max_tokens:
                return joined(request, [*parts[:-1], evolve(part, stop="length")], decode)
            rest = Request(
                id=f"{request.id}-from-{done}",
                tokens=np.concatenate([rest.tokens, part.tokens]),
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


def joined(request: Request, parts: Sequence[Completion], decode: Callable[[IntArray], str]) -> Completion:
    """Return the completion of parts with tokens. It ends with the first stop string that crosses two parts, if any."""
    tokens = np.concatenate([part.tokens for part in parts])
    starts = np.cumsum([0, *(len(part.tokens) for part in parts[:-1])])
    versions = [
        (int(start) + first, version)
        for start, part in zip(starts, parts, strict=True)
        for first, version in part.versions
    ]
    end = _stop_across(tokens, starts[1:].tolist(), request.sampling.stop, decode)
    return Completion(
        id=request.id,
        tokens=tokens[:end],
        logprobs=np.concatenate([part.logprobs for part in parts])[:end],
        stop=parts[-1].stop if end == len(tokens) else "stop",
        versions=tuple(
            (first, version)
            for i, (first, version) in enumerate(versions)
            if first < end and (i == 0 or version != versions[i - 1][1])
        ),
        columns=merged_columns(
            [(len(request.tokens) + int(start), part) for start, part in zip(starts, parts, strict=True)],
            len(request.tokens) + end,
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


def _stop_across(
    tokens: IntArray, starts: Sequence[int], stops: Sequence[str], decode: Callable[[IntArray], str]
) -> int:
    """Return the number of tokens up to the one that completes a stop string across parts. All tokens: there is none.

    A generator sees only the stop strings within its own part. Tokens sampled after a stop string across two parts
    would never have been requested, so the shortened completion is a sample of the same distribution.
    """
    longest = max((len(stop.encode()) for stop in stops), default=0)  # a token has at least one byte
    for start in starts:
        for end in range(start + 1, min(start + longest, len(tokens)) + 1):
            text = decode(tokens[max(0, end - longest - 1) : end])
            if any(stop in text for stop in stops):
                return end
    return len(tokens)
