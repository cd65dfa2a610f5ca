"""The text of a running completion, piece by piece, as soon as no later token can change it.

    tokens ──> decode ──> text up to a stop string ──> (reasoning, text before calls) ──> what is new

An end is held back while it may be a part of a character, the beginning of a stop string or of a tag, or the beginning
of tool calls, which are sent whole. The pieces add up to reasoning and text of the choice.
"""

from collections.abc import Iterator

from attrs import frozen

from whet.data.records import IntArray
from whet.interfaces.chat import Chat
from whet_endpoint.choices import Choice
from whet_endpoint.decoding import Decoding
from whet_endpoint.reading import Shape, shape_of
from whet_endpoint.requests import ApiRequest, shown

TOKENS_AT_A_TIME = 16
"""Tokens of one piece, where a generator reports none while it samples."""
CALLS_ALONE = ("{", "[", "<")
"""How calls begin that have nothing else beside them."""


@frozen
class Piece:
    """A piece of a choice: more of its reasoning, or more of its text."""

    text: str
    reasons: bool = False


class RunningText:
    """The text of one choice while it is sampled."""

    def __init__(self, request: ApiRequest, chat: Chat) -> None:
        self._request = request
        self._shape = shape_of(chat) if request.is_chat else None
        skip_special = self._shape is None or not self._shape.special
        self._decoding = Decoding(chat, continues=self._shape is None, skip_special=skip_special)
        self.count = 0
        """The number of tokens so far."""
        self._sent = ["", ""]

    def add(self, tokens: IntArray) -> Iterator[Piece]:
        """Add tokens, and yield what is new and certain."""
        self.count += len(tokens)
        ended = int(tokens[-1]) in self._request.sampling.stop_tokens
        if not self._decoding.add(tokens[:-1] if ended else tokens):
            return
        if self._request.forces_calls:
            return  # all of it is calls, which are sent whole
        stops = self._request.stops
        text = shown(self._decoding.text, stops)
        if len(text) == len(self._decoding.text):
            text = _without_partial(text, stops)
        yield from self._new(*(_certain(text, self._shape, self._request.reads_calls) if self._shape else ("", text)))

    def end(self, choice: Choice) -> Iterator[Piece]:
        """Yield the rest of a choice."""
        yield from self._new(choice.reasoning, choice.text)

    def _new(self, reasoning: str, text: str) -> Iterator[Piece]:
        for i, part in enumerate((reasoning, text)):
            # Nothing that was sent can be taken back. Tokenizers whose text of a token depends on tokens far before it
            # might get here; the record has the tokens either way.
            if part.startswith(self._sent[i]) and len(part) > len(self._sent[i]):
                new, self._sent[i] = part[len(self._sent[i]) :], part
                yield Piece(new, reasons=i == 0)


def _certain(text: str, shape: Shape, reads_calls: bool) -> tuple[str, str]:
    """Return the reasoning and the text of a response so far, without an end that the next tokens may change."""
    form = shape.format
    if form.channels or (reads_calls and form.calls is not None and form.calls.frame.leading):
        return "", ""  # such a response is told apart at its end
    calls = form.marks if reads_calls else ()
    reasoning, rest = _parted(text, shape)
    if rest is None:
        return _before(reasoning, calls).strip(), ""
    if reads_calls and not calls and rest.lstrip().startswith(CALLS_ALONE):
        return reasoning, ""
    begun, lead = rest.lstrip(), form.lead
    if lead and begun.startswith(lead):
        rest = begun[len(lead) :]
    elif (lead and lead.startswith(begun)) or not begun:
        return reasoning, ""
    text = _before(rest, (*calls, *form.tail[:1]))
    return reasoning, text.rstrip() if reads_calls or form.tail else text


def _parted(text: str, shape: Shape) -> tuple[str, str | None]:
    """Return the reasoning and the rest of a response so far. None: the reasoning goes on."""
    tags = shape.format.reasoning
    if tags is None:
        return "", text
    begun, inside = text.lstrip(), tags.opened
    if tags.open and begun.startswith(tags.open):
        text, inside = begun[len(tags.open) :], True
    elif inside and tags.open.startswith(begun):
        return "", None  # the prompt has opened it, and the model may write the tag again
    elif not inside and not begun.startswith(tags.close):
        # It may still become a tag. Otherwise it is text for good: what was sent as text cannot become reasoning.
        return ("", None) if tags.open.startswith(begun) or tags.close.startswith(begun) else ("", text)
    before, closed, after = text.partition(tags.close)
    return (before.strip(), after.lstrip("\n")) if closed else (_without_partial(text, (tags.close,)), None)


def _before(text: str, marks: tuple[str, ...]) -> str:
    """Return text up to the first mark, or to what may become one."""
    found = shown(text, tuple(mark for mark in marks if mark))
    return found if len(found) < len(text) else _without_partial(text, marks)


def _without_partial(text: str, marks: tuple[str, ...]) -> str:
    """Return text without the longest end with which a mark begins."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text
