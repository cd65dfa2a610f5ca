"""Preference data: a record with two responses to one prompt becomes a unit of two sequences, the chosen one first."""

from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.messages import Conversation
from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet_data.layouts import found_words
from whet_data.turns import (
    conversation_of,
    joined,
    refuse_no_turns,
    refuse_untrained,
    text_of,
    with_fields,
    with_system,
)

PAIR_FIELDS = ("prompt", "chosen", "rejected")
"""Fields of a preference pair. Without `prompt`, the other two are whole conversations, or with `plain` whole texts."""
SAME = "the chosen and the rejected response are the same; wanted two that differ: leave out the pair"
"""Why a pair of equal responses is refused: it shows no preference."""


def encode_pair(
    record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str], plain: bool = False
) -> list[dict[str, Any]]:
    """Tokenise a pair: the chosen sequence, then the rejected one, each with the column `chosen`.

    The loss is on the assistant's turns after the prompt. Messages and the column `tools` are as in demonstrations.
    `plain`: prompt and responses are texts, and there is no chat template. Raises `DataError` that names what the
    record lacks.
    """
    if plain:
        prompt, *texts = pair_texts(record, names)
        found = [chat.training_completion(prompt, text) for text in texts]
    else:
        chosen, rejected, first = pair_conversations(record, names)
        turns = [(whole, i) for whole in (chosen, rejected) for i in range(first, len(whole))]
        chat = with_fields(record, chat, *(whole[: i + 1] for whole, i in turns if whole[i].role == "assistant"))
        found = [chat.training(whole, first=first) for whole in (chosen, rejected)]
    return [
        {"tokens": one.tokens, "loss_mask": one.loss_mask, "prompt_length": one.prompt_length, "chosen": is_chosen}
        for one, is_chosen in zip(found, (True, False), strict=True)
    ]


def pair_conversations(record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Conversation, Conversation, int]:
    """Return the chosen conversation, the rejected one, and how many of their messages are the prompt.

    A response is a string, a list of messages that follow the prompt, or a whole conversation. Messages with which both
    conversations begin belong to the prompt, if responses follow them. `names` maps fields to the columns of the data.
    Raises `DataError` that names what the record lacks.
    """
    prompt, *responses = _given(record, names)
    if prompt is None and any(isinstance(response, str) for response in responses):
        raise DataError(
            f"there is no prompt, and a response is a string; a record has the columns {found_words(record)}; wanted "
            f"whole conversations, or `{names.get('prompt', 'prompt')}` (see algorithm.fields), or texts that begin "
            "with the prompt and algorithm.plain: true"
        )
    one, other, first = _conversations(prompt, *responses)
    for whole, response in zip((one, other), responses, strict=True):
        refuse_untrained(whole, first, response)
    (one, length), (other, _) = (with_system(record, names, whole, first) for whole in (one, other))
    return one, other, length


def pair_texts(record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the texts of prompt, chosen response and rejected response, to train on without a chat template.

    Without a prompt, it is what both texts begin with, up to the word in which they differ. A space before that word
    belongs to the responses, as in TRL's `extract_prompt`. (TRL also divides a word, whose tokens are then others.)
    Raises `DataError` that names what the record lacks.
    """
    prompt, chosen, rejected = _given(record, names)
    one, other = text_of(chosen), text_of(rejected)
    if one == other:
        raise DataError(SAME)
    if prompt is not None:
        return text_of(prompt), one, other
    length = _common(one, other)
    while length and not one[length - 1].isspace():
        length -= 1
    length -= one[length - 1 : length] == " "
    if not length:
        raise DataError(
            f"there is no prompt, and the texts begin with no word in common: {one!r:.40} and {other!r:.40}; wanted "
            f"`{names.get('prompt', 'prompt')}` (see algorithm.fields), or texts that begin with the prompt"
        )
    return one[:length], text_of(one[length:]), text_of(other[length:])


def _given(record: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """Return the values of a pair's columns. Raises `DataError` if a response is missing."""
    own = [names.get(name, name) for name in PAIR_FIELDS]
    prompt, chosen, rejected = (record.get(name) for name in own)
    if chosen is None or rejected is None:
        raise DataError(
            f"a record has the columns {found_words(record)}; wanted `{own[1]}` and `{own[2]}`, and `{own[0]}` where "
            "they are not whole conversations (see algorithm.fields)"
        )
    refuse_no_turns(record, names, PAIR_FIELDS)
    return prompt, chosen, rejected


def _conversations(prompt: Any, chosen: Any, rejected: Any) -> tuple[Conversation, Conversation, int]:
    """Return both conversations, and how many of their messages are the prompt."""
    asked = () if prompt is None else conversation_of(prompt)
    (one, first), (other, second) = (joined(asked, response) for response in (chosen, rejected))
    if one == other:
        raise DataError(SAME)
    if prompt is not None and (first is None) != (second is None):
        raise DataError(
            "one response is a whole conversation that begins otherwise than the prompt, and the other response "
            "follows the prompt; wanted two of the same kind"
        )
    shared = _common(one, other)
    roles = [whole[shared].role if shared < len(whole) else "nothing" for whole in (one, other)]
    if roles == ["assistant", "assistant"]:
        return one, other, shared
    if prompt is not None and first is not None:
        return one, other, first
    raise DataError(
        f"the conversations differ from message {shared + 1} on, where one has {roles[0]} and the other {roles[1]}; "
        "wanted a response of the assistant in both"
    )


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many messages, or letters, both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
