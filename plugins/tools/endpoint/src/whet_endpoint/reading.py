"""The parts of what the model wrote, as its chat template tells them apart: reasoning, text, calls of tools.

The record has the model's own tokens whatever is shown. An agent may send the reasoning back or leave it out: both
continue the recorded conversation.
"""

from weakref import WeakKeyDictionary

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Message
from whet.data.records import Completion, IntArray, with_ids
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_chat.response import ResponseFormat, response_format, tool_format
from whet_endpoint.choices import Choice
from whet_endpoint.decoding import continued
from whet_endpoint.errors import ApiError
from whet_endpoint.forced import read_calls
from whet_endpoint.requests import ApiRequest, shown

OPEN, CLOSE = "<think>", "</think>"
"""Tags around reasoning that an agent sends back within the text."""


@frozen
class Shape:
    """How the responses of a model are written, and how they are decoded to be read."""

    format: ResponseFormat
    special: bool
    """Whether a mark of the format is a special token, so that text decoded without special tokens lacks it."""

    def reasons(self, text: str) -> bool:
        """Return whether a response begins in reasoning, or with a tag of it. If not, a stream shows it as text."""
        tags, begun = self.format.reasoning, text.lstrip()
        marks = tuple(mark for mark in (tags.open, tags.close) if mark) if tags else ()
        return tags is not None and (tags.opened or begun.startswith(marks))

    def text(self, chat: Chat, tokens: IntArray) -> str:
        """Return the text of tokens, without a stop token at their end."""
        ended = len(tokens) > 0 and int(tokens[-1]) in chat.stop_tokens
        return chat.decode(tokens[:-1] if ended else tokens, skip_special=not self.special)


_SHAPES: WeakKeyDictionary[Chat, Shape] = WeakKeyDictionary()


def shape_of(chat: Chat) -> Shape:
    """Return how the responses of the model of a chat tokenizer are written."""
    if chat not in _SHAPES:
        found = response_format(chat)
        tags = (found.reasoning.open, found.reasoning.close) if found.reasoning else ()
        marks = (*tags, *found.marks, found.lead)  # of its tail nothing is shown
        hidden = any(mark not in chat.decode(chat.encode(mark)) for mark in marks if mark)
        _SHAPES[chat] = Shape(found, special=hidden or found.channels)
    return _SHAPES[chat]


def check_tools(request: ApiRequest, chat: Chat) -> None:
    """Raise `ApiError` where a request has tools, or calls of tools, that the chat template does not support."""
    if not isinstance(request.prompt, tuple):
        return
    if not request.tools and not any(message.calls for message in request.prompt):
        return
    try:
        tool_format(chat)
    except DataError as error:
        raise ApiError(400, str(error), "tools" if request.tools else "messages") from error


def text_prompt(chat: Chat, text: str) -> IntArray:
    """Return the tokens [prompt] of a text to continue, behind those that the tokenizer puts before a text."""
    tokens = chat.encode(text)
    opening = np.array(getattr(chat, "opening", ()), np.int64)  # of a `Tokenizer`, which the chat of a model is
    return tokens if np.array_equal(tokens[: len(opening)], opening) else np.concatenate([opening, tokens])


def read_choice(request: ApiRequest, chat: Chat, prompt: IntArray, completion: Completion) -> Choice:
    """Return a completion as it is shown: its text up to a stop string, and in chats its reasoning and calls."""
    shape = shape_of(chat) if request.is_chat and not request.forces_calls else None
    whole = shape.text(chat, completion.tokens) if shape else continued(chat, completion.tokens)
    text = shown(whole, request.stops)
    stop = next((stop for stop in request.stops if whole.startswith(stop, len(text))), "")
    if request.forces_calls and (calls := with_ids(read_calls(whole, request.tools), prompt, completion.tokens)):
        return Choice(prompt, completion, "", calls)
    if shape is None:
        return Choice(prompt, completion, text, stop=stop)
    form = shape.format if shape.reasons(text) else evolve(shape.format, reasoning=None)
    said = form.read(text, request.tools if request.reads_calls else ())
    calls = with_ids(said.calls, prompt, completion.tokens)
    return Choice(prompt, completion, said.text, calls, said.reasoning, stop)


def without_tags(message: Message) -> Message:
    """Return a message of the assistant with its reasoning apart, if it has tags of reasoning in its text."""
    begun, closed, rest = message.text.partition(CLOSE)
    if message.reasoning or not (closed or begun.lstrip().startswith(OPEN)):
        return message
    return evolve(message, reasoning=begun.strip().removeprefix(OPEN).strip(), content=rest.lstrip())
