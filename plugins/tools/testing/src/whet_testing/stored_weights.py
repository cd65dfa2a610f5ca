"""All weights of a model folder, and the check that two sets of weights are the same bits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def weights_of(folder: Path) -> dict[str, Any]:
    """Return all weights of a model folder, by name. Its index, if it has one, must name these and no others."""
    from safetensors.torch import load_file

    found = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        assert set(found) == set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    return found


def assert_bitwise(found: Mapping[str, Any], expected: Mapping[str, Any], dtype: Any = None) -> None:
    """Check names, dtypes and bits of weights. `dtype`: what the expected ones are cast to before."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        wanted = tensor.to(dtype or tensor.dtype)
        assert found[name].dtype == wanted.dtype, name
        assert found[name].equal(wanted), name
