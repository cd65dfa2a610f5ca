"""Weights that a model computes with in float32 even if it runs in bfloat16: some routers, and their biases."""

import re
from typing import Any


def kept_in_float32(model: Any) -> set[str]:
    """Return the names of the parameters that the model's class keeps in float32."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [re.compile(rf"(^|\.){part}($|\.)") for part in parts]
    return {name for name, _ in model.named_parameters() if any(pattern.search(name) for pattern in patterns)}
