"""The contract of a chat tokenizer: conversations become tokens, and tokens become text.

A distribution brings one by an entry point in the group `whet.chats`, which names a module with a class `ChatTokenizer`
and a function `given_template`; see `whet.plugins.features.CHAT`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, Self

from attrs import frozen

from whet.data.messages import Conversation, Message, Tools
from whet.data.records import BoolArray, IntArray

TrainOn = Literal["all", "last"]
"""Which of the assistant's turns to train on."""


@frozen(eq=False)
class Trainable:
    """A conversation or text as a sequence to train on."""

    tokens: IntArray  # [L]
    loss_mask: BoolArray  # [L], true on the tokens to train on
    prompt_length: int
    """Number of tokens before the first trained one."""


class Chat(Protocol):
    """A tokenizer and a chat template, as an episode needs them. Safe to use from several threads."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a turn: the end tokens of tokenizer, generation config and chat template."""

    def with_tools(self, tools: Tools) -> Self:
        """Return a copy whose conversations have these tools. A chat template that knows no tools leaves them out."""

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation, by default without the header of a next turn."""

    def encode(self, text: str) -> IntArray:
        """Return the tokens [L] of a text with nothing added."""

    def decode(self, tokens: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        """Return the text of tokens."""

    def pieces(self, tokens: IntArray) -> list[str]:
        """Return the text of each token [L] by itself, special tokens included."""

    def token_bytes(self, tokens: IntArray) -> list[bytes | None]:
        """Return the bytes of each token [L], of which several may make a character. None: the token is unknown."""

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return the tokens [L] that the model is to continue. They end with the header of its turn."""

    def continuation(self, history: Conversation, stopped: bool, messages: Conversation) -> IntArray:
        """Return the tokens to append after the model's last completion, so that it can respond to `messages`.

        `history` ends with the model's message. `stopped` is whether its last token is one of `stop_tokens`; if not,
        the tokens that close its turn come first. Raises `RewrittenHistory` if the template rewrites history.
        """

    def message(self, tokens: IntArray, prefill: str = "") -> Message:
        """Return a completion [completion] as the assistant's message: its text, which begins with the prefill."""

    def parts(self, message: Message) -> Message:
        """Return a message with its reasoning, content and tool calls apart, if the model wrote it."""


class Tokenizer(Chat, Protocol):
    """The tokenizer and chat template of a model folder, with what data to train on needs."""

    @property
    def folder(self) -> Path:
        """Return the model folder."""

    @property
    def plain_tokens(self) -> IntArray:
        """Return the ids of all tokens that are plain text, not special or added: [tokens], ascending."""

    @property
    def opening(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text: usually its begin token, or nothing."""

    def training(self, conversation: Conversation, train_on: TrainOn = "all", first: int = 0) -> Trainable:
        """Tokenise a conversation for training on the assistant's turns: content and end-of-turn token, no header.

        `train_on` chooses the turns; `first` is the first message that may be trained on. Raises `DataError` if there
        is no turn to train on, and `RewrittenHistory` if the template rewrites history.
        """

    def training_text(self, text: str) -> Trainable:
        """Tokenise plain text for training on all of it, between the tokenizer's own begin and end tokens."""

    def training_completion(self, prompt: str, completion: str) -> Trainable:
        """Tokenise a prompt and its completion without a template. The loss is on the completion."""
