"""The hooks of this plugin: the environments `arithmetic` and `math`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_math.config import ArithmeticConfig, MathConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environments `arithmetic` and `math`."""
    return [
        Component("arithmetic", ArithmeticConfig, "whet_env_math.arithmetic:Arithmetic", "whet_env_math.config:facts"),
        Component("math", MathConfig, "whet_env_math.dataset:MathDataset", "whet_env_math.config:facts"),
    ]
