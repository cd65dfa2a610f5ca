"""Models that vLLM can run on a CPU: its attention there wants heads of 32 numbers or more."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tiny_models: Callable[..., Path]) -> Callable[..., Path]:
    """Return the folder of a random model of a family, tied or not, with the weights of a seed."""
    return partial(tiny_models, hidden=128)
