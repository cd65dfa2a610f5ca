"""Preference data: a record with two responses to one prompt becomes a unit of two sequences, the chosen one first."""

from collections.abc import Mapping
from typing import Any

from whet.data.messages import Conversation, Message
from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet_data.layouts import found_words
from whet_data.turns import conversation_of, with_fields

PAIR_FIELDS = ("prompt", "chosen", "rejected")
"""Fields of a preference pair. Without `prompt`, the other two are whole conversations."""


def encode_pair(record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Tokenise a pair: the chosen sequence, then the rejected one, each with the column `chosen`.

    The loss is on the assistant's turns after the prompt. Messages and the column `tools` are as in demonstrations.
    Raises `DataError` that names what the record lacks.
    """
    chosen, rejected, first = pair_conversations(record, names)
    chat = with_fields(record, chat, chosen, rejected)
    found = [chat.training(whole, first=first) for whole in (chosen, rejected)]
    return [
        {"tokens": one.tokens, "loss_mask": one.loss_mask, "prompt_length": one.prompt_length, "chosen": is_chosen}
        for one, is_chosen in zip(found, (True, False), strict=True)
    ]


def pair_conversations(record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Conversation, Conversation, int]:
    """Return the chosen conversation, the rejected one, and how many of their messages are the prompt.

    A response is a string, a list of messages that follow the prompt, or a whole conversation. Without a prompt, the
    messages with which both conversations begin are the prompt. `names` maps fields to the columns of the data. Raises
    `DataError` that names what the record lacks.
    """
    prompt, *responses = (record.get(names.get(name, name)) for name in PAIR_FIELDS)
    if any(response is None for response in responses):
        own = [names.get(name, name) for name in PAIR_FIELDS]
        raise DataError(
            f"a record has the columns {found_words(record)}; wanted `{own[1]}` and `{own[2]}`, and `{own[0]}` where "
            "they are not whole conversations (see algorithm.fields)"
        )
    return _conversations(prompt, *responses)


def answered(prompt: Conversation, response: Any) -> Conversation:
    """Return the conversation of a prompt and a response: a string, the messages that follow, or all messages."""
    if isinstance(response, str):
        return (*prompt, Message("assistant", response))
    messages = conversation_of(response)
    return messages if prompt and messages[: len(prompt)] == prompt else (*prompt, *messages)


def _conversations(prompt: Any, chosen: Any, rejected: Any) -> tuple[Conversation, Conversation, int]:
    """Return both conversations, and how many of their messages are the prompt."""
    if prompt is not None:
        asked = conversation_of(prompt)
        return answered(asked, chosen), answered(asked, rejected), len(asked)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("there is no prompt, and a response is a string; wanted whole conversations, or a prompt")
    one, other = conversation_of(chosen), conversation_of(rejected)
    if one == other:
        raise DataError("both conversations are the same; wanted two that begin alike and differ in a response")
    pairs = zip(one, other, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    roles = [whole[first].role if first < len(whole) else "nothing" for whole in (one, other)]
    if roles != ["assistant", "assistant"]:
        raise DataError(
            f"the conversations differ from message {first + 1} on, where one has {roles[0]} and the other {roles[1]}; "
            "wanted a response of the assistant in both"
        )
    return one, other, first
