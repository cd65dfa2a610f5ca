"""The hooks of this plugin: the logger `console`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_console.config import ConsoleConfig


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `console`."""
    return [Component("console", ConsoleConfig, "whet_console.logger:ConsoleLogger")]
