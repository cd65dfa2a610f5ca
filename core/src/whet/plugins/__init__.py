"""The installed plugins: their hooks, what they offer, and which distribution offers a name."""


def __getattr__(name: str) -> object:
    if name == "load_plugins":  # until the next version; it is in `whet.plugins.registry`
        from whet.plugins.registry import load_plugins

        return load_plugins
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
