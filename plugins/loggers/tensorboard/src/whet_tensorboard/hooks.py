"""The hook of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_tensorboard.config import TensorboardConfig


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `tensorboard`."""
    return [Component("tensorboard", TensorboardConfig, "whet_tensorboard.logger:TensorboardLogger")]
