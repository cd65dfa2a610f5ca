"""Models that vLLM can run on a CPU: its attention there wants heads of 32 numbers or more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.testing.models import make_model

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Give the folder of a random model of a family, tied or not, with the weights of a seed."""
    made: dict[tuple[str, bool, int], Path] = {}

    def folder(family: str = "qwen3", *, tied: bool = True, seed: int = 0) -> Path:
        key = (family, tied, seed)
        if key not in made:
            made[key] = make_model(
                tmp_path_factory.mktemp("model"), tiny_tokenizer, family=family, hidden=128, tied=tied, seed=seed
            )
        return made[key]

    return folder
