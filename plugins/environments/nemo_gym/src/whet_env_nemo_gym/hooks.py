"""The hooks of this plugin: the environment `nemo-gym`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_nemo_gym.config import NemoGymConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `nemo-gym`."""
    target, facts = "whet_env_nemo_gym.environment:NemoGym", "whet_env_nemo_gym.config:facts"
    return [Component("nemo-gym", NemoGymConfig, target, facts)]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return a problem where agents are to find the model at a port that is not known before the run."""
    for path, section in config.played():
        own = section.component.config
        if isinstance(own, NemoGymConfig) and own.agents and not config.endpoint.port:
            where = f"the agents of {path} call the model at one address; set a port, and name it in their model server"
            return [Problem("endpoint.port", f"is 0, a port that is free when the run starts; {where}")]
    return []
