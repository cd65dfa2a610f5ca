"""Reasoning: the part of a response between `<think>` and `</think>`, which some dialects show apart from the text.

The record has the model's own tokens whatever is shown. An agent may send the reasoning back or leave it out: both
continue the recorded conversation.
"""

from weakref import WeakKeyDictionary

from whet.data.messages import Message
from whet.errors import DataError
from whet.interfaces.chat import Chat

OPEN, CLOSE = "<think>", "</think>"
_INSIDE: WeakKeyDictionary[Chat, bool] = WeakKeyDictionary()


def begins_inside(chat: Chat) -> bool:
    """Return whether the chat template opens the reasoning itself, at the end of each prompt."""
    if chat not in _INSIDE:
        try:
            prompt = chat.decode(chat.prompt((Message("user", "steel"),)), skip_special=False)
        except DataError:
            prompt = ""
        _INSIDE[chat] = prompt.rstrip().endswith(OPEN)
    return _INSIDE[chat]


def split(text: str, inside: bool = False) -> tuple[str, str]:
    """Return reasoning and text. `inside`: the text begins in the reasoning."""
    begun = text.lstrip()
    if begun.startswith(OPEN):
        begun = begun[len(OPEN) :]
    elif not inside:
        return "", text
    reasoning, closed, rest = begun.partition(CLOSE)
    return reasoning.strip(), rest.lstrip() if closed else ""


def split_running(text: str, inside: bool) -> tuple[str, str]:
    """Return reasoning and text of a response that goes on, without an end that the next tokens may change."""
    begun = text.lstrip()
    if not inside and OPEN.startswith(begun):
        return "", ""  # it may become a tag
    if CLOSE not in text and (inside or begun.startswith(OPEN)):
        begun = begun[: len(begun) - partial(begun, (CLOSE,))]
        return split(begun if begun.startswith(OPEN) or not OPEN.startswith(begun) else "", inside)
    return split(text, inside)


def partial(text: str, marks: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text with which a mark begins; 0: there is none."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )


def whole(reasoning: str, text: str) -> str:
    """Return a response with its reasoning, as models write it."""
    return f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{text}" if reasoning else text


def parts(text: str) -> tuple[str, str]:
    """Return reasoning and text of a message that somebody sent, with or without the tag that opens the reasoning."""
    return split(text, CLOSE in text)
