"""whet sharpens language models: a thin core that composes plugins from one YAML file.

Importing this package loads nothing heavy; `whet.open` and the hook markers are all it exports.
"""

TYPE_CHECKING = False  # that of `typing`, whose import takes as long as all else that a command does before it starts
if TYPE_CHECKING:
    import pluggy

    from whet.compose import open as open

    hookimpl = pluggy.HookimplMarker("whet")
    """Mark a function of a plugin's `hooks.py` as an implementation of the hook of that name."""

__version__ = "0.1.0"

__all__ = ["hookimpl", "open"]


def __getattr__(name: str) -> object:
    if name == "open":
        from whet.compose import open as open_run

        return open_run
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("whet")
    raise AttributeError(f"module 'whet' has no attribute {name!r}")
