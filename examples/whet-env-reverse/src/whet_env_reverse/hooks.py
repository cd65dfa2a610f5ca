"""What this plugin offers: the environment `reverse`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_reverse.config import ReverseConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer `reverse`."""
    return [Component("reverse", ReverseConfig, "whet_env_reverse.environment:build")]
