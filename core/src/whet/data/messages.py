"""Messages of a conversation. Content is a list of typed parts: text and images.

No model reads images yet: chat templates refuse them. Environments, records and the report have them.

Tool calls and reasoning that others wrote stand beside the content, in the terms of OpenAI's API. What the model itself
wrote is recorded as its text, all of it; `Message.written` keeps its special tokens, for who reads its parts.
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


@frozen
class Image:
    """A part of a message that is an image."""

    url: str
    """A URL with the data, `data:image/png;base64,...`, or the address of the image."""
    type: str = "image"


Part = Text | Image


def _parts(content: str | Iterable[Part]) -> tuple[Part, ...]:
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
    content: tuple[Part, ...] = field(converter=_parts)
    """The parts of the message. Text alone may be passed as a string."""
    calls: tuple[Call, ...] = ()
    """Tool calls of an assistant message. They come after its content."""
    answers: str = ""
    """For a tool message: the id of the call whose result it is."""
    reasoning: str = ""
    """Reasoning of an assistant message. It comes before its content."""
    written: str = field(default="", eq=False, repr=False)
    """What the model itself wrote, special tokens included, without the stop token. Empty: others wrote the message.
    The content of a message that the model wrote has its calls, too."""

    @property
    def text(self) -> str:
        """Return the text of all parts that are text, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def plain(self) -> "str | list[dict[str, str]]":
        """Return the content as builtins: a string if all of it is text, else a list of parts."""
        if all(isinstance(part, Text) for part in self.content):
            return self.text
        return [
            {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": "image", "url": part.url}
            for part in self.content
        ]


Conversation = tuple[Message, ...]


def conversation(value: "str | Message | Mapping[str, Any] | Iterable[Message | Mapping[str, Any]]") -> Conversation:
    """Return a conversation from a string (one user message), a record or dict, or several. Raises `DataError`."""
    if isinstance(value, str):
        return (Message("user", value),)
    if isinstance(value, Message | Mapping):
        return (value if isinstance(value, Message) else _message(value),)
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
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise DataError(f"a message's content must be a string or a list of parts, found {content!r:.120}")
    return Message(role, tuple(map(_part, content)))


def _part(part: Mapping[str, Any]) -> Part:
    """Return a part from a dict. OpenAI's form `{"type": "image_url", "image_url": {"url": ...}}` is an image, too."""
    kind, url = part.get("type"), part.get("url", part.get("image_url"))
    url = url.get("url") if isinstance(url, Mapping) else url
    if kind == "text" and isinstance(part.get("text"), str):
        return Text(part["text"])
    if kind in ("image", "image_url") and isinstance(url, str):
        return Image(url)
    raise DataError(
        "a part of a message must be a text, {type: text, text: ...}, or an image, {type: image, url: ...}, found "
        f"{part!r:.120}"
    )
