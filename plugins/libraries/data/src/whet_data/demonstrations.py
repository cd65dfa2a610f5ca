"""Turns demonstrations (records that show a good response) into sequences to train on."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from whet.data.messages import Conversation
from whet.errors import DataError, RewrittenHistory
from whet.interfaces.chat import Tokenizer, Trainable, TrainOn
from whet_data.layouts import found_words
from whet_data.turns import answered, conversation_of, refuse_no_turns, text_of, untrained, with_fields, with_system

FIELDS = ("messages", "prompt", "completion", "text", "tools")
"""Fields of a record: `messages`, or `prompt` and `completion`, or `text`; and `tools` beside a conversation."""


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
    chat: Tokenizer,
    names: Mapping[str, str],
    train_on: TrainOn = "all",
    plain: bool = False,
) -> list[dict[str, Any]]:
    """Tokenise a record. Raises `DataError` that names what the record lacks. See `trainable`."""
    found = trainable(record, chat, names, train_on, plain)
    return [{"tokens": one.tokens, "loss_mask": one.loss_mask, "prompt_length": one.prompt_length} for one in found]


def trainable(
    record: Mapping[str, Any],
    chat: Tokenizer,
    names: Mapping[str, str],
    train_on: TrainOn = "all",
    plain: bool = False,
) -> list[Trainable]:
    """Tokenise a record for training into one sequence, or more where the chat template rewrites history.

    `{"messages": ...}`: the loss is on the assistant's turns. `{"prompt": ..., "completion": ...}`: the loss is on the
    completion; with `plain`, without a chat template. `{"text": ...}`: the loss is on all of it, without a template.
    Messages may have tool calls and reasoning in fields, and `weight: 0` where they are not trained on. A record may
    have `tools` and `system` beside them; see `whet_data.turns`. `names` maps these fields to the columns of the data.
    """
    called = {name: names.get(name, name) for name in FIELDS}
    given = {name: record[own] for name, own in called.items() if record.get(own) is not None}
    paired = "prompt" in given and "completion" in given
    refuse_no_turns(record, names, ("messages",) if "messages" in given else ("prompt", "completion") if paired else ())
    if "messages" in given:
        whole, first = with_system(record, names, conversation_of(given["messages"]))
        return _turns(whole, chat, train_on, given, first, untrained(given["messages"]))
    if paired and plain:
        return [chat.training_completion(text_of(given["prompt"]), text_of(given["completion"]))]
    if paired:
        whole, first = answered(conversation_of(given["prompt"]), given["completion"])
        whole, first = with_system(record, names, whole, first)
        return _turns(whole, chat, train_on, given, first, untrained(given["completion"]))
    if "text" in given:
        return [chat.training_text(text_of(given["text"]))]
    pair = record.get("chosen") is not None and record.get("rejected") is not None
    preferences = "; `chosen` and `rejected` are for algorithms that read preferences, such as dpo, kto and rm"
    raise DataError(
        f"a record has the columns {found_words(record)}; wanted `{called['messages']}`, or `{called['prompt']}` and "
        f"`{called['completion']}`, or `{called['text']}` (see algorithm.fields){preferences * pair}"
    )


def _turns(
    whole: Conversation, chat: Tokenizer, train_on: TrainOn, record: Mapping[str, Any], first: int,
    left_out: Collection[int],
) -> list[Trainable]:  # fmt: skip
    """Return sequences in which each turn of the assistant is trained once, from message `first` on.

    A sequence ends with the last turn that it trains. It has as many turns as the template renders in it as it does
    where each is last. So each turn is trained as the model will write it, whatever messages follow it. Turns that are
    `left_out` (places from the end) are not trained; a sequence ends before such a turn, or begins after it.
    """
    turns = [i for i, message in enumerate(whole) if message.role == "assistant" and i >= first]
    trained = [i for i in turns if i - len(whole) not in left_out]
    if turns and turns[-1] not in trained[-1:] and (train_on == "last" or not trained):
        which = "the last message" if train_on == "last" else "each message"
        raise DataError(f"{which} of the assistant has `weight: 0` or `train: false`, so there is none to train on")
    chat = with_fields(record, chat, *(whole[: i + 1] for i in trained))
    if train_on == "last" or len(turns) < 2:
        return [chat.training(whole, train_on, first)]  # it leaves out what follows the last turn
    found = []
    for run in (list(run) for is_trained, run in itertools.groupby(turns, trained.__contains__) if is_trained):
        while run:
            one, count = _longest(whole[: run[-1] + 1], chat, run)
            found.append(one)
            run = run[count:]
    return found


def _longest(whole: Conversation, chat: Tokenizer, turns: Sequence[int]) -> tuple[Trainable, int]:
    """Return the sequence that trains as many of the turns as stand unchanged in it, and their number."""
    try:
        return chat.training(whole, first=turns[0]), len(turns)
    except RewrittenHistory:
        if len(turns) == 1:
            raise
    found, fits, fails = chat.training(whole[: turns[0] + 1], first=turns[0]), 1, len(turns)
    while fails - fits > 1:
        count = min(2 * fits, (fits + fails) // 2)  # most often few fit, so few are tried first
        try:
            found, fits = chat.training(whole[: turns[count - 1] + 1], first=turns[0]), count
        except RewrittenHistory:
            fails = count
    return found, fits
