"""The column `routed_experts`: which models have it, and its form in a completion. Imports no torch."""

from typing import Any

import numpy as np

from whet.data.model_info import ModelInfo
from whet.errors import WhetError

COLUMN = "routed_experts"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of `config.json` with the number of experts."""


def routed_experts(model: ModelInfo) -> frozenset[str]:
    """Return the columns that a generator can record for a model: `routed_experts` if its config states experts."""
    inner = model.config.get("text_config")
    texts = [model.config, inner if isinstance(inner, dict) else {}]
    counts = [text.get(key) for text in texts for key in _COUNTS]
    return frozenset({COLUMN} if any(isinstance(count, int) and count > 1 for count in counts) else ())


def completion_column(found: Any, prompt: int, completion: int, who: str) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return an engine's experts [tokens, layers, k] as a column [prompt + completion, layers * k].

    The last token was no input, so it may be missing. Raises `WhetError` if others are.
    """
    experts = np.asarray(found)
    wanted = prompt + completion
    if experts.ndim != 3 or len(experts) not in (wanted, wanted - 1):
        raise WhetError(
            f"{who} recorded experts of shape {list(experts.shape)} for a prompt of {prompt} and a completion of "
            f"{completion} tokens; wanted [{wanted - 1}, layers, k]"
        )
    column = np.full((wanted, experts.shape[1] * experts.shape[2]), -1, np.int16)
    column[: wanted - 1] = experts[: wanted - 1].reshape(wanted - 1, -1)
    return column
