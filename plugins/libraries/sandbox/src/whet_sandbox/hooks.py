"""The hooks of this library: the sandboxes `namespaces` and `docker`."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component
from whet_sandbox.config import DockerConfig, NamespacesConfig


@hookimpl
def whet_sandboxes() -> Iterable[Component]:
    """Offer the sandboxes `namespaces` and `docker`."""
    return [
        Component("namespaces", NamespacesConfig, "whet_sandbox.namespaces:Namespaces"),
        Component("docker", DockerConfig, "whet_sandbox.docker:Docker"),
    ]
