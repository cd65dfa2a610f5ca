"""One completion as it is shown: its text, reasoning, tool calls, and the logprobs of its tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import define, field, frozen

from whet.data.messages import Call, Message
from whet.data.records import Completion, FloatArray, IntArray, Progress
from whet.interfaces.chat import Chat


@frozen(eq=False)
class Likeliest:
    """The likeliest tokens at each position of a completion."""

    tokens: IntArray
    """[completion, k]."""
    logprobs: FloatArray
    """[completion, k]."""


@frozen(eq=False)
class Choice:
    """One completion of a request."""

    prompt: IntArray
    """All tokens before it: [prompt]."""
    completion: Completion
    text: str
    """The shown text: without special tokens and reasoning, up to a stop string of the request or the first call of a
    tool."""
    calls: tuple[Call, ...] = ()
    """Calls of tools after the text."""
    reasoning: str = ""
    """The reasoning before the text, where it is shown apart."""
    stop: str = ""
    """The stop string of the request that ended it, if one did."""
    likeliest: Likeliest | None = None

    @property
    def message(self) -> Message:
        """Return the response as a message of the conversation."""
        return Message("assistant", self.text, self.calls, reasoning=self.reasoning)

    @property
    def calls_tools(self) -> bool:
        """Return whether the response is complete and ends with calls of tools."""
        return bool(self.calls) and self.completion.stop == "stop"


def cut_short(name: str) -> Choice:
    """Return the choice of a response for which the context had no room: no token, and stopped by the length."""
    none = np.zeros(0, np.int64)
    return Choice(none, Completion(name, none, np.zeros(0, np.float32), "length", ()), "")


@frozen(eq=False)
class Tokens:
    """Some tokens of a completion, to be shown with their logprobs."""

    tokens: IntArray
    """[n]."""
    logprobs: FloatArray
    """[n]."""
    likeliest: Likeliest | None = None

    def part(self, where: slice) -> "Tokens":
        """Return some of the tokens."""
        top = self.likeliest
        likeliest = None if top is None else Likeliest(top.tokens[where], top.logprobs[where])
        return Tokens(self.tokens[where], self.logprobs[where], likeliest)

    def entries(self, chat: Chat) -> Iterator[dict[str, Any]]:
        """Yield for each token what OpenAI's API shows of it."""
        top = self.likeliest
        for i, entry in enumerate(_entries(self.tokens, self.logprobs, chat)):
            others = _entries(top.tokens[i], top.logprobs[i], chat) if top is not None else ()
            yield {**entry, "top_logprobs": list(others)}


def _entries(tokens: IntArray, logprobs: FloatArray, chat: Chat) -> Iterator[dict[str, Any]]:
    found = zip(chat.pieces(tokens), logprobs.tolist(), chat.token_bytes(tokens), strict=True)
    for text, logprob, own in found:  # a token may be a part of a character, whose bytes its text does not have
        yield {"token": text, "logprob": logprob, "bytes": None if own is None else list(own)}


def tokens_of(choice: Choice, begin: int = 0) -> Tokens:
    """Return the tokens of a choice from a position on."""
    completion, top = choice.completion, choice.likeliest
    part = Likeliest(top.tokens[begin:], top.logprobs[begin:]) if top is not None else None
    return Tokens(completion.tokens[begin:], completion.logprobs[begin:], part)


@define(eq=False)
class Collected:
    """The likeliest tokens of a running completion, as they are reported."""

    _rows: list[tuple[IntArray, FloatArray]] = field(factory=list, init=False)

    def add(self, progress: Progress) -> None:
        """Add reported tokens. A completion that begins again replaces what came before."""
        del self._rows[progress.begin :]
        self._rows += zip(progress.likeliest, progress.likeliest_logprobs, strict=True)

    def of(self, completion: Completion) -> Likeliest | None:
        """Return the likeliest tokens of a completion. None: they were not reported."""
        rows = self._rows[: len(completion.tokens)]
        if len(rows) < len(completion.tokens):
            return None
        return Likeliest(np.stack([tokens for tokens, _ in rows]), np.stack([logprobs for _, logprobs in rows]))
