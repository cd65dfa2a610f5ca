"""The hooks of this plugin."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component, Problem
from whet.config.sections import Config
from whet_fsdp2.config import Fsdp2Config


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
    """Yield a problem for each fsdp2 section, of the backend or of a role, that sets the warm-up twice."""
    sections = {"backend": config.backend, **{f"roles.{name}": role.component for name, role in config.roles.items()}}
    for path, section in sections.items():
        backend = section.config
        if isinstance(backend, Fsdp2Config) and backend.schedule.warmup_ratio and backend.schedule.warmup_steps:
            ratio, steps = backend.schedule.warmup_ratio, backend.schedule.warmup_steps
            words = f"is {ratio:g}, and warmup_steps is {steps}; state one of the two"
            yield Problem(f"{path}.schedule.warmup_ratio", words)
