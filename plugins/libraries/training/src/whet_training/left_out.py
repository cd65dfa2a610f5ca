"""What is said of stored weights for which a model has no place."""

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from whet.errors import WhetError

logger = logging.getLogger(__name__)

NUMBERED = re.compile(r"(.*\b(?:layers|h|blocks)\.)(\d+)\.")
FURTHER = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.")
"""Parts of a layer that predicts further tokens. DeepSeek stores it behind the others, and no model here has it."""


def check_left_out(
    path: str, left_out: Collection[str], known: Collection[str], config: Mapping[str, Any], owner: str,
    *, aloud: bool = True,
) -> None:  # fmt: skip
    """Warn of stored weights that a model has no place for, if `aloud`.

    `known`: the names that it has a place for. `config`: of `config.json`. `owner`: what the model is called. Raises
    `WhetError` if config.json is that of another model: biases lack in it, or layers.
    """
    names = sorted(left_out)
    if wrong := [*_biases(names, set(known)), *_layers(names, known, config)]:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise WhetError(
            f"model.path: the weights in {path} hold {wrong[0]}{more}, and config.json describes {owner} without; "
            "correct config.json (attention_bias, mlp_bias, num_hidden_layers), or remove them from the weights"
        )
    if names and aloud:
        logger.warning(
            "the weights in %s have %d tensor%s that %s has no place for: %s%s; left out, also of exports",
            path, len(names), "s"[: len(names) - 1], owner, ", ".join(names[:3]), ", ..." if len(names) > 3 else "",
        )  # fmt: skip


def _biases(names: list[str], known: Collection[str]) -> list[str]:
    """Return the biases of projections that the model has without."""
    return [name for name in names if name.endswith("_proj.bias") and name.removesuffix("bias") + "weight" in known]


def _layers(names: list[str], known: Collection[str], config: Mapping[str, Any]) -> list[str]:
    """Return the weights of layers behind the model's last one, other than of layers that predict further tokens."""
    last: dict[str, int] = {}
    for layers, number in filter(None, map(_place, known)):
        last[layers] = max(last.get(layers, 0), number)
    places = {name: place for name in names if (place := _place(name)) and place[1] > last.get(place[0], place[1])}
    further = {place for name, place in places.items() if FURTHER.search(name)}
    stated = config.get("num_nextn_predict_layers")
    stated = stated if isinstance(stated, int) else 0
    return [name for name, place in places.items() if place not in further and place[1] > last[place[0]] + stated]


def _place(name: str) -> tuple[str, int] | None:
    """Return the name of the layers that a weight is among, and the number of its own. None: it is in no layer."""
    found = NUMBERED.match(name)
    return None if found is None else (found[1], int(found[2]))
