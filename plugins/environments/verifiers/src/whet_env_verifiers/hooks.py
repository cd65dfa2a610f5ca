"""The hooks of this plugin: the environment `verifiers`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_env_verifiers.config import VerifiersConfig


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `verifiers`."""
    target, facts = "whet_env_verifiers.environment:Verifiers", "whet_env_verifiers.config:facts"
    return [Component("verifiers", VerifiersConfig, target, facts)]
