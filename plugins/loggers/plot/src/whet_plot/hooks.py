"""The hooks of this plugin: the logger `plot`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_plot.config import PlotConfig


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `plot`."""
    return [Component("plot", PlotConfig, "whet_plot.logger:PlotLogger")]
