"""`whet schema`: every key of a section or a component, with type, default and meaning."""

import json
import textwrap
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command
from whet_start.registry_option import elsewhere, load_registry, registry_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from whet.plugins.registry import Registry
    from whet_start.explain import FieldDoc


@click.command(cls=Command, short_help="Explain the keys of sections and components.")
@click.argument("name", required=False)
@registry_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def schema(name: str | None, config: str | None, as_json: bool) -> None:
    """Explain the keys of NAME: a section (`rollout`), a component, or KIND/COMPONENT.

    Without NAME, list them all.
    """
    import attrs

    from whet_start.explain import describe, summary

    registry = load_registry(config)
    classes = dict(_classes(registry))
    if name is None:
        _list(classes, as_json)
        return
    chosen = {title: cls for title, cls in classes.items() if f"/{title}".endswith(f"/{name}")}
    if not chosen:
        raise _unknown(name, registry, list(classes), config)
    if as_json:
        records = {title: [attrs.asdict(field) for field in describe(cls)] for title, cls in chosen.items()}
        click.echo(json.dumps(records, indent=2))
        return
    for title, cls in chosen.items():
        click.echo(f"{click.style(title, bold=True)}: {summary(cls)}\n")
        click.echo("\n".join(_lines(describe(cls))))


def _classes(registry: "Registry") -> "Iterator[tuple[str, type]]":
    """Yield the attrs classes of all sections by path, and of all components as KIND/NAME."""
    from whet.component import KINDS
    from whet_start.explain import sections

    yield from sections().items()
    for kind in KINDS:
        for name, offer in registry.offers(kind).items():
            yield f"{kind}/{name}", offer.component.config


def _list(classes: dict[str, type], as_json: bool) -> None:
    from whet_start.explain import selections, summary

    if as_json:
        click.echo(json.dumps({title: summary(cls) for title, cls in classes.items()}, indent=2))
        return
    width = max(map(len, classes))
    for title, cls in classes.items():
        click.echo(f"{click.style(title.ljust(width), bold=True)}  {summary(cls)}")
    holders = ", ".join(f"{section} ({kind})" for section, kind in selections().items())
    click.echo(f"\nSections that hold components, chosen by `use:`: {holders}")


def _unknown(name: str, registry: "Registry", titles: list[str], config: str | None) -> Exception:
    from whet.component import KINDS
    from whet.config.messages import choice_words, nearest
    from whet.errors import ConfigError
    from whet.plugins.catalog import offered_words
    from whet_start.explain import selections

    if (kind := selections().get(name)) is not None:
        offers = ", ".join(registry.offers(kind)) or "none is installed"
        return ConfigError(f"{name} holds one of the {kind}; ask for one of them: {offers}")
    given_kind = next((kind for kind in KINDS if name.startswith(f"{kind}/")), None)
    if given_kind is not None:
        registry.find(given_kind, name.partition("/")[2])  # quotes plugins that are broken or offer a name twice
    if owners := dict.fromkeys(owner for _, owner in elsewhere(registry, name)):
        return ConfigError(f"no installed plugin has {name!r}; {'; '.join(map(offered_words, owners))}")
    known = [*titles, *(title.rpartition("/")[2] for title in titles)]
    suspects = "".join(f"\nnot usable, and might offer it: {broken}" for broken in registry.broken)
    hint = "" if config else "\na component of a single file is seen with the config that names it: --config FILE"
    choice = choice_words(name, dict.fromkeys(known)) if nearest(name, known) else "; `whet schema` lists all"
    return ConfigError(f"there is no section or component {name!r}{choice}{suspects}{hint}")


def _lines(fields: "list[FieldDoc]") -> "Iterator[str]":
    for field in fields:
        default = "" if field.default == "" else field.default if field.default == "required" else f"= {field.default}"
        yield f"{click.style(field.name, bold=True)}  {field.type}  {default}".rstrip()
        if field.doc:
            yield textwrap.fill(field.doc, 100, initial_indent="    ", subsequent_indent="    ")
    if not fields:
        yield "It has no keys."
