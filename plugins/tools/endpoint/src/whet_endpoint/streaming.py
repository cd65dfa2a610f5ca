"""The text of a running completion, piece by piece, as soon as no later token can change it.

    tokens ──> decode ──> text ──> shown ──> (reasoning, text) ──> what is new

An end is held back while it may be a part of a character, the beginning of a stop string, or the beginning of tool
calls, which are sent whole. The pieces add up to the text of the choice.
"""

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from whet.data.records import IntArray
from whet.interfaces.chat import Chat
from whet_chat.response import tool_format
from whet_endpoint.choices import Choice
from whet_endpoint.reasoning import begins_inside, partial, split_running
from whet_endpoint.requests import ApiRequest, shown
from whet_endpoint.tool_calls import splits_itself

UNFINISHED = "\ufffd"
"""What tokenizers write for a part of a character."""
TOKENS_AT_A_TIME = 16
"""Tokens of one piece, where a generator reports none while it samples."""


@frozen
class Piece:
    """A piece of a choice: more of its reasoning, or more of its text."""

    text: str
    reasons: bool = False


class RunningText:
    """The text of one choice while it is sampled."""

    def __init__(self, request: ApiRequest, chat: Chat) -> None:
        self._request, self._chat = request, chat
        call_format = tool_format(chat) if request.reads_calls else None
        self._marks = call_format.marks if call_format else ()
        self._skip_special = all(mark in chat.decode(chat.encode(mark)) for mark in self._marks)
        self._calls_alone = call_format is not None and not self._marks
        # Where a template has tags or channels of its own, all is sent at the end.
        self._whole = (call_format is not None and call_format.channels) or (
            request.splits_reasoning and splits_itself(chat)
        )
        self._inside = request.splits_reasoning and begins_inside(chat)
        self._tokens: IntArray = np.zeros(0, np.int64)
        self._done, self._read = 0, 0
        """Tokens whose text is in `_text`, and where the last of them that need context begin."""
        self._text, self._sent = "", ["", ""]

    @property
    def count(self) -> int:
        """Return the number of tokens so far."""
        return len(self._tokens)

    def add(self, tokens: IntArray) -> Iterator[Piece]:
        """Add tokens, and yield what is new and certain."""
        self._tokens = np.concatenate([self._tokens, tokens])
        stops = self._request.sampling.stop_tokens
        usable = self._tokens if int(self._tokens[-1]) not in stops else self._tokens[:-1]
        before = self._chat.decode(usable[self._read : self._done], skip_special=self._skip_special)
        after = self._chat.decode(usable[self._read :], skip_special=self._skip_special)
        if after.endswith(UNFINISHED) or not after.startswith(before):
            return
        self._text += after[len(before) :]
        self._read, self._done = self._done, len(usable)
        yield from self._new(*self._certain())

    def end(self, choice: Choice) -> Iterator[Piece]:
        """Yield the rest of a choice."""
        yield from self._new(choice.reasoning, choice.text)

    def matches(self, tokens: IntArray) -> bool:
        """Return whether a completion begins with the tokens so far."""
        return np.array_equal(tokens[: self.count], self._tokens)

    def _certain(self) -> tuple[str, str]:
        """Return reasoning and text, without an end that the next tokens may change."""
        if self._whole:
            return "", ""
        stops = self._request.stops
        text = shown(self._text, stops)
        if len(text) == len(self._text):
            text = text[: len(text) - partial(text, stops)]
        if self._request.reads_calls:
            text = self._before_calls(text)
        return split_running(text, self._inside) if self._request.splits_reasoning else ("", text)

    def _before_calls(self, text: str) -> str:
        if self._calls_alone and text.lstrip()[:1] in ("", "{", "["):
            return ""
        at = min((at for mark in self._marks if (at := text.find(mark)) >= 0), default=len(text))
        text = text[:at] if at < len(text) else text[: at - partial(text, self._marks)]
        return text.rstrip()

    def _new(self, *parts: str) -> Iterator[Piece]:
        for i, (sent, part) in enumerate(zip(self._sent, parts, strict=True)):
            # Nothing that was sent can be taken back. Tokenizers whose text of a token depends on tokens far before it
            # might get here; the record has the tokens either way.
            if part.startswith(sent) and len(part) > len(sent):
                self._sent[i] = part
                yield Piece(part[len(sent) :], reasons=i == 0)
