"""The hooks of this plugin: the environment `gymnasium`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_gymnasium.config import GymnasiumConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `gymnasium`."""
    target = "whet_env_gymnasium.environment:Gymnasium"
    return [Component("gymnasium", GymnasiumConfig, target, "whet_env_gymnasium.config:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each game that cannot be played here, e.g. because Gymnasium is not installed."""
    from whet_env_gymnasium.environment import problem

    for path, section in config.played():
        found = section.component.config
        if isinstance(found, GymnasiumConfig) and (reason := problem(found)):
            yield Problem(f"{path}.{reason[0]}", reason[1])
