"""Paths in a config."""

import os
from collections.abc import Mapping
from pathlib import Path


def is_path(named: str) -> bool:
    """Return whether `named` is the path of an interpreter. Otherwise it is the name of an environment."""
    return os.sep in named


def absolute_paths(named: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping with paths made absolute. Names of environments stay unchanged."""
    return {role: str(Path(one).expanduser().absolute()) if is_path(one) else one for role, one in named.items()}
