"""The contract of a chat tokenizer: messages become tokens, and tokens become text."""

from typing import Protocol

from whet.data.messages import Conversation, Message, Tools
from whet.data.records import IntArray


class Chat(Protocol):
    """The methods of `whet.data.chat.ChatTokenizer` that an episode needs; each is described there."""

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...  # noqa: D102 - as there

    def prompt(self, conversation: Conversation) -> IntArray: ...  # noqa: D102

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray: ...  # noqa: D102

    def encode(self, text: str) -> IntArray: ...  # noqa: D102

    def decode(self, tokens: IntArray, skip_special: bool = True) -> str: ...  # noqa: D102

    def pieces(self, tokens: IntArray) -> list[str]: ...  # noqa: D102

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str: ...  # noqa: D102

    def message(self, tokens: IntArray, prefill: str = "") -> Message: ...  # noqa: D102

    def parts(self, message: Message) -> Message: ...  # noqa: D102

    def with_tools(self, tools: Tools) -> "Chat": ...  # noqa: D102
