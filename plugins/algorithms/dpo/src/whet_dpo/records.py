"""Turns records of a data file into sequences to compare."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet_data.layouts import found_words
from whet_data.preferences import answered, encode_pair
from whet_data.turns import conversation_of, with_fields
from whet_dpo.config import DpoConfig, KtoConfig, reads_response_mask
from whet_dpo.loss_config import RESPONSE

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.data import Encode


def pair_encoder(config: DpoConfig, model: "ModelInfo") -> "Encode":
    """Return the function that turns a record into two sequences to compare."""
    encode = encode_with_prompt if reads_response_mask(config.loss, model) else encode_pair
    return partial(encode, names=config.fields)


def labelled_encoder(config: KtoConfig, model: "ModelInfo") -> "Encode":
    """Return the function that turns a record into sequences with labels."""
    return partial(encode_labelled, names=config.fields)


def encode_with_prompt(record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Tokenise a pair whose chosen conversation is trained as a whole, except its first token.

    The column `response_mask` marks the tokens of the response. Raises `DataError` that names what the record lacks.
    """
    return [
        {**one, RESPONSE: one["loss_mask"], "loss_mask": _all_but_first(one) if one["chosen"] else one["loss_mask"]}
        for one in encode_pair(record, chat, names)
    ]


def _all_but_first(sequence: Mapping[str, Any]) -> Any:
    """Return the mask of the tokens that have a token before them: all except the first."""
    return np.arange(len(sequence["tokens"])) > 0


def encode_labelled(record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Tokenise a response with its label: a sequence with the column `desirable`. A pair is two sequences in a unit.

    `names` maps fields to the columns of the data. Raises `DataError` that names what the record lacks.
    """
    own = {name: names.get(name, name) for name in ("prompt", "completion", "label", "chosen", "rejected")}
    prompt, completion, label = (record.get(own[name]) for name in ("prompt", "completion", "label"))
    if completion is None and record.get(own["chosen"]) is not None:
        return [_labelled(one) for one in encode_pair(record, chat, names)]
    if prompt is None or completion is None or label is None:
        raise DataError(
            f"a record has the columns {found_words(record)}; wanted `{own['prompt']}`, `{own['completion']}` and "
            f"`{own['label']}`, or the fields of a pair (see algorithm.fields)"
        )
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise DataError(f"the label is {label!r:.40}, wanted true (desirable) or false")
    asked = conversation_of(prompt)
    whole = answered(asked, completion)
    found = with_fields(record, chat, whole).training(whole, first=len(asked))
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
