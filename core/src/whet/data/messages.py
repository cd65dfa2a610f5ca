"""Messages of a conversation. Content is a list of typed parts; text is the only type so far.

Tool calls that others wrote stand beside the content, in the terms of OpenAI's API. What the model itself wrote is
recorded as its text, tool calls included.
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
    """A tool call."""

    id: str
    """Identifies the call. The message with the tool's result refers to it."""
    name: str
    """Name of the tool."""
    arguments: str
    """The arguments as a JSON object."""


@frozen
class Message:
    """One message. `Message("user", "hi")` and `Message("user", (Text("hi"),))` are the same."""

    role: str
    """One of `ROLES`: `system`, `user`, `assistant`, `tool`."""
    content: tuple[Text, ...] = field(converter=_parts)
    """The parts of the message. Text alone may be passed as a string."""
    calls: tuple[Call, ...] = ()
    """Tool calls of an assistant message. They come after its content."""
    answers: str = ""
    """For a tool message: the id of the call whose result it is."""

    @property
    def text(self) -> str:
        """Return the text of all parts, joined."""
        return "".join(part.text for part in self.content)


Conversation = tuple[Message, ...]


def conversation(value: "str | Message | Iterable[Message | Mapping[str, Any]]") -> Conversation:
    """Return a conversation from a string (one user message), records or dicts. Raises `DataError`."""
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
