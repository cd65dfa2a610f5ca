"""Weights that a model computes with in float32 even if it runs in bfloat16: some routers, and their biases."""

import re
from typing import Any

import torch
from torch import Tensor, nn


def kept_in_float32(model: Any) -> set[str]:
    """Return the names of the parameters that the model's class keeps in float32."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [re.compile(rf"(^|\.){part}($|\.)") for part in parts]
    return {name for name, _ in model.named_parameters() if any(pattern.search(name) for pattern in patterns)}


def lower(model: Any) -> None:
    """Cast the weights of a model to bfloat16, except those that it keeps in float32."""
    kept = kept_in_float32(model)
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


def modules_in_float32(model: Any) -> list[nn.Module]:
    """Return the outermost modules all of whose parameters are kept in float32."""
    kept = kept_in_float32(model)
    named: dict[str, Tensor] = dict(model.named_parameters())
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        own = {one for one in named if one.startswith(f"{name}.")} if name else set(named)
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if own and own <= kept and not inside:
            found.append((name, module))
    return [module for _, module in found]
