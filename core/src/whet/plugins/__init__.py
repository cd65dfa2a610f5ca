"""The installed plugins: their hooks, what they offer, and which distribution offers a name."""

import importlib


def __getattr__(name: str) -> object:
    if name == "load_plugins":  # until the next version; it is in `whet.plugins.registry`
        return importlib.import_module("whet.plugins.registry").load_plugins
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
