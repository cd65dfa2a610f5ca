"""Makes a data set of reasoning-gym from a config. Imports the library, which takes seconds, when it is first called."""

import difflib
from collections.abc import Mapping
from typing import Any

from whet.errors import DataError, PluginError

INSTALL = "pip install 'whet-env-reasoning-gym[library]'"


def create(dataset: str, config: Mapping[str, Any], seed: int, size: int) -> Any:
    """Return the data set. Raises `DataError` for a name or settings that the library does not know."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise PluginError(f"reasoning-gym cannot be imported: {error}; {INSTALL}") from error
    settings = dict(config)
    names = [part["name"] for part in settings.get("datasets", ())] if dataset == "composite" else []
    for name in (dataset, *names):
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise DataError(f"reasoning-gym has no data set {name!r}, but {len(DATASETS)} others{meant}")
    if names:
        from reasoning_gym.composite import DatasetSpec

        settings["datasets"] = [
            DatasetSpec(part["name"], part.get("weight", 1.0), part.get("config", {})) for part in settings["datasets"]
        ]
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    except Exception as error:  # the library asserts, and its dataclasses raise TypeError
        raise DataError(
            f"reasoning-gym cannot make {size} tasks of {dataset!r} with {dict(config)}: "
            f"{type(error).__name__}: {error}; settings are listed in its gallery"
        ) from error
