"""The hooks of this plugin: the environment `openenv`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_openenv.config import OpenEnvConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `openenv`."""
    target, facts = "whet_env_openenv.environment:OpenEnv", "whet_env_openenv.config:facts"
    return [Component("openenv", OpenEnvConfig, target, facts)]
