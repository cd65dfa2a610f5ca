"""whet sharpens language models: a thin core that composes plugins from one YAML file.

Importing this package loads nothing heavy; `whet.open` and the hook markers are all it exports.
"""

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from whet.compose import open as open

__version__ = "0.1.0"

hookimpl = pluggy.HookimplMarker("whet")
"""Mark a function of a plugin's `hooks.py` as an implementation of the hook of that name."""

__all__ = ["hookimpl", "open"]


def __getattr__(name: str) -> Any:
    if name == "open":
        from whet.compose import open as open_run

        return open_run
    raise AttributeError(f"module 'whet' has no attribute {name!r}")
