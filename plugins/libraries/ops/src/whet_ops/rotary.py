"""How long sequences may be so that a model's rotary embeddings do not depend on other sequences. Imports no torch."""

from typing import Any


def longest_alone(model: Any) -> int | None:
    """Return the most tokens of a sequence whose positions do not depend on other sequences of its pass. None: any.

    Beyond, rotary frequencies follow the longest sequence of the pass: `transformers` has one set of them for a pass.
    """
    settings = model.config.get_text_config()
    rope = getattr(settings, "rope_parameters", None) or {}
    limits = []
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # or a part for each kind of layer
        if one.get("rope_type") == "longrope":
            limits.append(int(one.get("original_max_position_embeddings", settings.max_position_embeddings)))
        elif "dynamic" in str(one.get("rope_type")):
            limits.append(int(settings.max_position_embeddings))
    return min(limits, default=None)
