"""The hooks of this plugin: the environment `nemo-gym`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_nemo_gym.config import NemoGymConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `nemo-gym`."""
    target, facts = "whet_env_nemo_gym.environment:NemoGym", "whet_env_nemo_gym.config:facts"
    return [Component("nemo-gym", NemoGymConfig, target, facts)]
