"""whet fine-tunes language models: a thin core that composes plugins from one YAML file.

Importing this package loads nothing heavy; each name below is imported when it is first used.
"""

import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes as long as all else that a command does before it starts
if TYPE_CHECKING:
    import pluggy

    from whet.run.compose import open as open

    hookimpl = pluggy.HookimplMarker("whet")
    """Mark a function of a plugin's `hooks.py` as an implementation of the hook of that name."""
    __version__: str
    """The version of core."""


class _PathsOfBefore:
    """Finds modules by their paths of earlier versions."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        """Return how a module that nothing else has found is imported; None: it is not whet's."""
        if not name.startswith("whet."):
            return None
        from whet.moved import find

        return find(name)


sys.meta_path.append(_PathsOfBefore)  # type: ignore[arg-type]

__all__ = ["__version__", "hookimpl", "open"]


def __getattr__(name: str) -> object:
    if name == "open":
        from whet.run.compose import open as open_run

        return open_run
    if name == "hookimpl":
        import pluggy

        return pluggy.HookimplMarker("whet")
    if name == "__version__":
        from whet.component import CORE_VERSION

        return CORE_VERSION
    raise AttributeError(f"module 'whet' has no attribute {name!r}")
