"""From the records of a data file to sequences with one place for their score.

tokens      [p p p a a .]       `values` at a place stand for what is before it, so one place follows the response
loss_mask   [. . . . . 1]
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet.rollout.scorer import whole
from whet_data.preferences import pair_conversations, pair_texts
from whet_data.turns import with_fields, with_tools_named
from whet_rm.config import MARGIN, RmConfig, reads_margin

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.data import Encode


def encoder(config: RmConfig, model: "ModelInfo") -> "Encode":
    """Return what turns a record into two sequences to score."""
    return partial(encode, names=config.fields, margin=reads_margin(config.loss, model), plain=config.plain)


def encode(
    record: Mapping[str, Any], chat: Tokenizer, names: Mapping[str, str], margin: bool = False, plain: bool = False
) -> list[dict[str, Any]]:
    """Tokenise a pair as a judge would: the chosen sequence, then the rejected one, each with the column `chosen`.

    The prompt is what both begin with, so that a backend that shares prompts computes it once. `margin`: with the
    record's margin as a column. `plain`: prompt and response are texts, and there is no chat template. Raises
    `DataError` that names what the record lacks.
    """
    if plain:
        asked, *texts = pair_texts(record, names)
        found = [chat.training_completion(asked, text).tokens for text in texts]
    else:
        record = with_tools_named(record, names)
        chosen, rejected, _ = pair_conversations(record, names)
        chat = with_fields(record, chat, chosen, rejected)
        found = [chat.training(one, "last").tokens for one in (chosen, rejected)]
    prompt = _common(*found)
    further = {MARGIN: _margin(record, names.get(MARGIN, MARGIN))} if margin else {}
    return [
        {**whole(tokens), "prompt_length": prompt, "chosen": is_chosen, **further}
        for tokens, is_chosen in zip(found, (True, False), strict=True)
    ]


def _common(one: Any, other: Any) -> int:
    """Count the tokens that both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _margin(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"the field `{name}` is {value!r:.40}, wanted a number: by how much the chosen response is better (see "
            "algorithm.fields), or algorithm.loss.margin: 0"
        )
    return float(value)
