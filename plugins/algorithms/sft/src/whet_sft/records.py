"""From the records of a data file to sequences to train on."""

from collections.abc import Mapping
from typing import Any

from whet.data.chat import ChatTokenizer, Trainable
from whet.data.messages import Conversation, Message, conversation
from whet.errors import DataError
from whet_sft.config import FIELDS, SftConfig


def encode(record: Mapping[str, Any], chat: ChatTokenizer, config: SftConfig) -> list[dict[str, Any]]:
    """Tokenise a record: one sequence. Raises `DataError` saying what it lacks."""
    found = trainable(record, chat, config)
    return [{"tokens": found.tokens, "loss_mask": found.loss_mask, "prompt_length": found.prompt_length}]


def trainable(record: Mapping[str, Any], chat: ChatTokenizer, config: SftConfig) -> Trainable:
    """Tokenise `{"messages": ...}`, `{"prompt": ..., "completion": ...}` (the loss is on the completion alone) or
    `{"text": ...}` (on all of it, without a template; with `config.plain` completions have none either).
    `config.fields` says what these are called in the data.
    """
    names = {name: config.fields.get(name, name) for name in FIELDS}
    given = {name: record[own] for name, own in names.items() if record.get(own) is not None}
    if "messages" in given:
        return chat.training(conversation(given["messages"]), config.train_on)
    if "prompt" in given and "completion" in given and config.plain:
        return chat.training_completion(_string(given["prompt"]), _string(given["completion"]))
    if "prompt" in given and "completion" in given:
        prompt = conversation(given["prompt"])
        return chat.training((*prompt, *_completion(given["completion"])), config.train_on, first=len(prompt))
    if "text" in given:
        return chat.training_text(_string(given["text"]))
    raise DataError(
        f"a record has the fields {list(record)!r:.120}; wanted `{names['messages']}`, or "
        f"`{names['prompt']}` and `{names['completion']}`, or `{names['text']}` (see algorithm.fields)"
    )


def _completion(value: Any) -> Conversation:
    return (Message("assistant", value),) if isinstance(value, str) else conversation(value)


def _string(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"a text must be a string that is not empty, found {value!r:.120}")
    return value
