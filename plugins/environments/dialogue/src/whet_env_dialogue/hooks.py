"""The hooks of this plugin: the environment `simulated-user`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_dialogue.config import SimulatedUserConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `simulated-user`."""
    target, facts = "whet_env_dialogue.simulated_user:SimulatedUser", "whet_env_dialogue.config:facts"
    return [Component("simulated-user", SimulatedUserConfig, target, facts)]
