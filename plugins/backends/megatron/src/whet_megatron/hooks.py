"""The hooks of this plugin."""

from collections.abc import Iterable, Iterator, Mapping

from whet import hookimpl
from whet.component import Component, Problem
from whet.config.sections import Config
from whet_megatron.checks import problems
from whet_megatron.config import MegatronConfig
from whet_megatron.generator.config import MegatronGeneratorConfig, checked
from whet_megatron.parallel import ParallelConfig
from whet_training import lora_config


@hookimpl
def whet_backends() -> Iterable[Component]:
    """Offer the backend `megatron`."""
    return [
        Component(
            name="megatron",
            config=MegatronConfig,
            target="whet_megatron.backend:MegatronBackend",
            facts="whet_megatron.config:facts",
        )
    ]


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator `megatron`, which decodes with Megatron's own inference."""
    return [
        Component(
            name="megatron",
            config=MegatronGeneratorConfig,
            target="whet_megatron.generator.handle:MegatronGenerator",
            facts="whet_megatron.generator.config:facts",
        )
    ]


@hookimpl
def whet_check_config(config: Config) -> Iterable[Problem]:
    """Yield what is wrong with each megatron section, of the backend or of a role; and with a generator beside it."""
    sections = {"backend": config.backend, **{f"roles.{name}": role.component for name, role in config.roles.items()}}
    for path, section in sections.items():
        if isinstance(section.config, MegatronConfig):
            role = path.removeprefix("roles.")
            own = config.roles[role].model if role in config.roles else None
            where = f"{path}.model.dtype" if own else "model.dtype"
            yield from problems(
                section.config, path, config.cluster.gpus.get(role, 0), (own or config.model).dtype, where
            )
            yield from lora_config.problems(section.config.lora, config, f"{path}.lora")
    yield from _unequal(config, {path.removeprefix("roles."): section.config for path, section in sections.items()})
    yield from checked(config)


def _unequal(config: Config, roles: Mapping[str, object]) -> Iterator[Problem]:
    """Find roles of the same processes whose axes have other sizes: a worker would refuse them."""
    for group in [list(roles)] if config.cluster.colocate is None else config.cluster.colocate:
        first = dict[str, tuple[str, ParallelConfig]]()
        for role in (role for role in roles if role in group):
            if isinstance(section := roles[role], MegatronConfig):
                name, sizes = first.setdefault(config.cluster.python.get(role, ""), (role, section.parallel))
                if section.parallel != sizes:
                    words = f"differs from that of {name} in the same processes, where Megatron has one set of groups"
                    change = "use equal sizes, or take the role out of cluster.colocate"
                    path = role if role == "backend" else f"roles.{role}"
                    yield Problem(f"{path}.parallel", f"{words}; {change}")
