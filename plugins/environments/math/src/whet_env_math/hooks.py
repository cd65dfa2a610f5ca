"""What this plugin offers: the environment `arithmetic`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_math.config import ArithmeticConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer `arithmetic`."""
    return [Component("arithmetic", ArithmeticConfig, "whet_env_math.arithmetic:Arithmetic")]
