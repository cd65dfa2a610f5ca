"""Messages of a conversation. Content is a list of typed parts from the first day; text is the only kind yet.

Calls of tools stand beside the content where others wrote them, in the terms of OpenAI's API. What the model itself
wrote is recorded as its text, calls included.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from whet.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


@frozen
class Text:
    """A part of a message that is text."""

    text: str
    type: str = "text"


def _parts(content: str | Iterable[Text]) -> tuple[Text, ...]:
    return (Text(content),) if isinstance(content, str) else tuple(content)


Tools = tuple[str, ...]
"""Tools that a model may call: the JSON of each, as chat templates take it."""


@frozen
class Call:
    """A call of a tool."""

    id: str
    """Names it, for the message that answers it."""
    name: str
    """The tool's."""
    arguments: str
    """A JSON object."""


@frozen
class Message:
    """One message. `Message("user", "hi")` and `Message("user", (Text("hi"),))` are the same."""

    role: str
    """One of `ROLES`: `system`, `user`, `assistant`, `tool`."""
    content: tuple[Text, ...] = field(converter=_parts)
    """Its parts; text alone may be given as a string."""
    calls: tuple[Call, ...] = ()
    """Of an assistant that calls tools, after its content."""
    answers: str = ""
    """Of a tool: the id of the call that it answers."""

    @property
    def text(self) -> str:
        """The text of all parts, joined."""
        return "".join(part.text for part in self.content)


Conversation = tuple[Message, ...]


def conversation(value: "str | Message | Iterable[Message | Mapping[str, Any]]") -> Conversation:
    """Read a conversation from what people write: a string (one user message), records or dicts."""
    if isinstance(value, str):
        return (Message("user", value),)
    if isinstance(value, Message):
        return (value,)
    if not isinstance(value, Iterable):
        raise DataError(f"a conversation must be a string or a list of messages, found {value!r:.120}")
    return tuple(item if isinstance(item, Message) else _message(item) for item in value)


def _message(item: Mapping[str, Any]) -> Message:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise DataError(f"a message needs `role` and `content`, found {item!r:.120}")
    role, content = item["role"], item["content"]
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"a message has the role {role!r:.40}, wanted one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return Message(role, content)
    if not isinstance(content, list) or not all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        raise DataError(f"a message's content must be a string or a list of text parts, found {content!r:.120}")
    if not all(isinstance(part.get("text"), str) for part in content):
        raise DataError(f"a text part of a message needs `text`, and it must be a string, found {content!r:.120}")
    return Message(role, tuple(Text(part["text"]) for part in content))
