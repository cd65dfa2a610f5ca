"""The responses of one key that later requests continue by their ids (`previous_response_id`)."""

from collections import OrderedDict

from attrs import define, field

from whet.data.messages import Conversation, Image, Message

MOST_RESPONSES, MOST_CHARACTERS = 4096, 32 << 20
"""Beyond these limits the oldest responses are forgotten. Messages that responses share are counted for each."""


def response_id(name: str) -> str:
    """Return the id of a response in the Responses dialect."""
    return f"resp_{name}"


@define(eq=False)
class Memory:
    """Conversations by the ids of their responses."""

    _kept: "OrderedDict[str, tuple[Conversation, int]]" = field(factory=OrderedDict, init=False)
    _characters: int = field(default=0, init=False)

    def keep(self, id_: str, conversation: Conversation) -> None:
        """Keep a conversation, which ends with a response."""
        size = sum(map(_size, conversation))
        self._kept[id_] = conversation, size
        self._characters += size
        while len(self._kept) > MOST_RESPONSES or (self._characters > MOST_CHARACTERS and len(self._kept) > 1):
            self._characters -= self._kept.popitem(last=False)[1][1]

    def find(self, id_: str) -> Conversation | None:
        """Return the conversation up to a response. None: it was not kept, or is forgotten."""
        found = self._kept.get(id_)
        return found[0] if found else None


def _size(message: Message) -> int:
    parts = sum(len(part.url if isinstance(part, Image) else part.text) for part in message.content)
    return parts + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
