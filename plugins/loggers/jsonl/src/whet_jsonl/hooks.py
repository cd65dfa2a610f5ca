"""The hook of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_jsonl.config import JsonlConfig


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `jsonl`."""
    return [Component("jsonl", JsonlConfig, "whet_jsonl.logger:JsonlLogger")]
