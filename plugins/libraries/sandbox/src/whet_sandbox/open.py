"""Open the sandbox that a config chooses, and ask beforehand whether it works on this machine."""

from typing import Any

from whet.component import Selection
from whet.config.build import build_selection
from whet_sandbox.limits import Limits
from whet_sandbox.sandbox import Sandbox

_REASONS: dict[Any, str] = {}


def open_sandbox(chosen: Selection, limits: Limits | None = None, at_once: int | None = None) -> Sandbox:
    """Return the sandbox of a section `sandbox: {use: ...}`. Nothing is started yet.

    :param at_once: most sandboxes at a time, none of them warm. None: as the section has it.
    """
    return Sandbox(build_selection(chosen), limits, at_once)


def why_not(chosen: Selection) -> str:
    """Run a small program, and return why that is impossible on this machine. Empty: it works.

    A sandbox that works is tried once in the life of this process.
    """
    key = repr(chosen)
    if _REASONS.get(key, "unknown"):
        sandbox = open_sandbox(chosen)
        try:
            _REASONS[key] = sandbox.why_not()
        finally:
            sandbox.close()
    return _REASONS[key]
