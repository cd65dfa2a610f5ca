"""The responses of one key that later requests continue by their ids (`previous_response_id`)."""

from collections import OrderedDict

from attrs import define, field

from whet.data.messages import Conversation, Image, Message

MOST_RESPONSES, MOST_CHARACTERS, MOST_PARTS = 4096, 32 << 20, 1 << 18
"""Beyond these limits the oldest responses are forgotten. Messages that responses share are counted for each. Parts are
messages, their texts, images and calls: each takes some hundred bytes even where it is empty."""


def response_id(name: str) -> str:
    """Return the id of a response in the Responses dialect."""
    return f"resp_{name}"


@define(eq=False)
class Memory:
    """Conversations by the ids of their responses."""

    _kept: "OrderedDict[str, Conversation]" = field(factory=OrderedDict, init=False)
    _characters: int = field(default=0, init=False)
    _parts: int = field(default=0, init=False)

    def keep(self, id_: str, conversation: Conversation) -> None:
        """Keep a conversation, which ends with a response."""
        self._kept[id_] = conversation
        self._count(conversation, 1)
        while len(self._kept) > MOST_RESPONSES or (self._is_full and len(self._kept) > 1):
            self._count(self._kept.popitem(last=False)[1], -1)

    def find(self, id_: str) -> Conversation | None:
        """Return the conversation up to a response. None: it was not kept, or is forgotten."""
        return self._kept.get(id_)

    @property
    def _is_full(self) -> bool:
        return self._characters > MOST_CHARACTERS or self._parts > MOST_PARTS

    def _count(self, conversation: Conversation, sign: int) -> None:
        self._characters += sign * sum(map(_characters, conversation))
        self._parts += sign * sum(1 + len(message.content) + len(message.calls) for message in conversation)


def _characters(message: Message) -> int:
    parts = sum(len(part.url if isinstance(part, Image) else part.text) for part in message.content)
    calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.calls)
    return parts + len(message.reasoning) + len(message.answers) + calls
