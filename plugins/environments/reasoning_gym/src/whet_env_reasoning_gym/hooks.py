"""The hooks of this plugin: the environment `reasoning-gym`. It scores nothing without a sandbox."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_reasoning_gym.config import ReasoningGymConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `reasoning-gym`."""
    target = "whet_env_reasoning_gym.environment:ReasoningGym"
    return [Component("reasoning-gym", ReasoningGymConfig, target, "whet_env_reasoning_gym.config:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each data set that cannot be made here, e.g. because reasoning-gym is not installed."""
    from whet_env_reasoning_gym.environment import problem

    for path, section in config.played():
        found = section.component.config
        if isinstance(found, ReasoningGymConfig) and (reason := problem(found)):
            yield Problem(f"{path}.{reason[0]}", reason[1])
