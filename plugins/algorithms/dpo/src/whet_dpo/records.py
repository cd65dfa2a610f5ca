"""Turns records of a data file into sequences to compare."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet_data.layouts import found_words
from whet_data.preferences import encode_pair
from whet_data.turns import (
    answered,
    before_response,
    conversation_of,
    refuse_no_turns,
    refuse_untrained,
    text_of,
    with_fields,
    with_system,
    with_tools_named,
)
from whet_dpo.config import LABELLED_FIELDS, DpoConfig, KtoConfig, reads_response_mask
from whet_dpo.loss_config import RESPONSE

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.data import Encode


def pair_encoder(config: DpoConfig, model: "ModelInfo") -> "Encode":
    """Return the function that turns a record into two sequences to compare."""
    encode = encode_with_prompt if reads_response_mask(config.loss, model) else encode_pair
    return partial(_with_tools, encode, names=config.fields, plain=config.plain)


def labelled_encoder(config: KtoConfig, model: "ModelInfo") -> "Encode":
    """Return the function that turns a record into sequences with labels."""
    return partial(_with_tools, encode_labelled, names=config.fields, plain=config.plain)


def _with_tools(
    encode: Callable[..., list[dict[str, Any]]], record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str],
    plain: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Encode a record whose tools stand in the column that `names` has for them."""
    return encode(with_tools_named(record, names), chat, names, plain)


def encode_with_prompt(
    record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str], plain: bool = False
) -> list[dict[str, Any]]:
    """Tokenise a pair whose chosen conversation is trained as a whole, except its first token.

    The column `response_mask` marks the tokens of the response. Raises `DataError` that names what the record lacks.
    """
    return [
        {**one, RESPONSE: one["loss_mask"], "loss_mask": _all_but_first(one) if one["chosen"] else one["loss_mask"]}
        for one in encode_pair(record, chat, names, plain)
    ]


def _all_but_first(sequence: Mapping[str, Any]) -> Any:
    """Return the mask of the tokens that have a token before them: all except the first."""
    return np.arange(len(sequence["tokens"])) > 0


def encode_labelled(
    record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str], plain: bool = False
) -> list[dict[str, Any]]:
    """Tokenise a response with its label: a sequence with the column `desirable`. A pair is two sequences in a unit.

    The prompt of a whole conversation is all before the assistant's messages at its end. `names` maps fields to the
    columns of the data. `plain`: prompt and response are texts, and there is no chat template. Raises `DataError` that
    names what the record lacks.
    """
    own = {name: names.get(name, name) for name in LABELLED_FIELDS}
    prompt, completion, messages, label = (record.get(own[name]) for name in LABELLED_FIELDS[:4])
    if completion is None and record.get(own["chosen"]) is not None:
        return [_labelled(one) for one in encode_pair(record, chat, names, plain)]
    paired = prompt is not None and completion is not None
    if label is None or not (paired or (messages is not None and not plain)):
        talk = "" if plain else f"`{own['messages']}` and `{own['label']}`, or "
        raise DataError(
            f"a record has the columns {found_words(record)}; wanted `{own['prompt']}`, `{own['completion']}` and "
            f"`{own['label']}`, or {talk}the fields of a pair (see algorithm.fields)"
        )
    if not isinstance(label, bool | int | float) or label not in (0, 1):
        raise DataError(f"the label is {label!r:.40}, wanted true (desirable) or false")
    refuse_no_turns(record, names, ("prompt", "completion") if paired else ("messages",))
    if plain:
        found = chat.training_completion(text_of(prompt), text_of(completion))
    else:
        response = completion if paired else messages
        whole, first = answered(conversation_of(prompt) if paired else (), response)
        first = first if paired else before_response(whole)
        refuse_untrained(whole, first, response)
        whole, first = with_system(record, names, whole, first)
        shown = (whole[: i + 1] for i in range(first, len(whole)) if whole[i].role == "assistant")
        found = with_fields(record, chat, *shown).training(whole, first=first)
    return [
        {
            "tokens": found.tokens,
            "loss_mask": found.loss_mask,
            "prompt_length": found.prompt_length,
            "desirable": bool(label),
        }
    ]


def _labelled(sequence: dict[str, Any]) -> dict[str, Any]:
    """Return both sequences of a pair, the chosen one labelled as desirable."""
    return {("desirable" if name == "chosen" else name): value for name, value in sequence.items()}
