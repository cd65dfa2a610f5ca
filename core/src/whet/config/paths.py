"""Paths in a config."""

import os
from collections.abc import Mapping
from pathlib import Path


def is_path(named: str) -> bool:
    """Whether a config names an interpreter by its path rather than by the name of an environment."""
    return os.sep in named


def absolute_paths(named: Mapping[str, str]) -> dict[str, str]:
    """Make those absolute that are paths; names stay as they are."""
    return {role: str(Path(one).expanduser().absolute()) if is_path(one) else one for role, one in named.items()}
