"""Turns demonstrations (records that show a good response) into sequences to train on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from whet.data.chat import ChatTokenizer, Trainable
from whet.data.messages import Conversation, Message, conversation
from whet.errors import DataError
from whet_data.layouts import found_words

FIELDS = ("messages", "prompt", "completion", "text")
"""Fields of a record: `messages`, or `prompt` and `completion`, or `text`."""
TrainOn = Literal["all", "last"]


def known_fields(fields: Sequence[str]) -> Callable[[object, Any, Mapping[str, str]], None]:
    """Return an attrs validator of a mapping from field names to column names of the data."""

    def check(instance: object, attribute: Any, value: Mapping[str, str]) -> None:
        unknown = [name for name in value if name not in fields]
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}, wanted {', '.join(fields)}: what a field is, then its name")

    return check


def record_fields(names: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the columns that a record may have, as the data names them. A record has all columns of one tuple."""
    given = {name: names.get(name, name) for name in FIELDS}
    return (given["messages"],), (given["prompt"], given["completion"]), (given["text"],)


def encode(
    record: Mapping[str, Any],
    chat: ChatTokenizer,
    names: Mapping[str, str],
    train_on: TrainOn = "all",
    plain: bool = False,
) -> list[dict[str, Any]]:
    """Tokenise a record into one sequence. Raises `DataError` that names what the record lacks. See `trainable`."""
    found = trainable(record, chat, names, train_on, plain)
    return [{"tokens": found.tokens, "loss_mask": found.loss_mask, "prompt_length": found.prompt_length}]


def trainable(
    record: Mapping[str, Any],
    chat: ChatTokenizer,
    names: Mapping[str, str],
    train_on: TrainOn = "all",
    plain: bool = False,
) -> Trainable:
    """Tokenise a record for training.

    `{"messages": ...}`: the loss is on the assistant's turns. `{"prompt": ..., "completion": ...}`: the loss is on the
    completion; with `plain`, without a chat template. `{"text": ...}`: the loss is on all of it, without a template.
    `names` maps these fields to the columns of the data.
    """
    called = {name: names.get(name, name) for name in FIELDS}
    given = {name: record[own] for name, own in called.items() if record.get(own) is not None}
    if "messages" in given:
        return chat.training(conversation(given["messages"]), train_on)
    if "prompt" in given and "completion" in given and plain:
        return chat.training_completion(_string(given["prompt"]), _string(given["completion"]))
    if "prompt" in given and "completion" in given:
        prompt = conversation(given["prompt"])
        return chat.training((*prompt, *_completion(given["completion"])), train_on, first=len(prompt))
    if "text" in given:
        return chat.training_text(_string(given["text"]))
    raise DataError(
        f"a record has the columns {found_words(record)}; wanted `{called['messages']}`, or "
        f"`{called['prompt']}` and `{called['completion']}`, or `{called['text']}` (see algorithm.fields)"
    )


def _completion(value: Any) -> Conversation:
    return (Message("assistant", value),) if isinstance(value, str) else conversation(value)


def _string(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"a text must be a string that is not empty, found {value!r:.120}")
    return value
