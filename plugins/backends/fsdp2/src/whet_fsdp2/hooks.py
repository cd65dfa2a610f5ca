"""The hooks of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component, Problem
from whet.config.sections import Config
from whet_fsdp2.checks import problems
from whet_fsdp2.config import Fsdp2Config
from whet_training import lora_config


@hookimpl
def whet_backends() -> Iterable[Component]:
    """Offer the backend `fsdp2`."""
    return [
        Component(
            name="fsdp2",
            config=Fsdp2Config,
            target="whet_fsdp2.backend:Fsdp2Backend",
            facts="whet_fsdp2.config:facts",
        )
    ]


@hookimpl
def whet_check_config(config: Config) -> Iterable[Problem]:
    """Yield what is wrong with each fsdp2 section, of the backend or of a role, by itself."""
    sections = {"backend": config.backend, **{f"roles.{name}": role.component for name, role in config.roles.items()}}
    for path, section in sections.items():
        if isinstance(section.config, Fsdp2Config):
            yield from problems(section.config, path)
            yield from lora_config.problems(section.config.lora, config, f"{path}.lora")
