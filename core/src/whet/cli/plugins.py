"""`whet plugins`: the installed plugins, and those that cannot be used."""

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from whet.cli.command import Group, load_registry, registry_option
from whet.cli.why import besides, why

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from whet.plugins.registry import Registry


@click.group(cls=Group, invoke_without_command=True)
@registry_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def plugins(context: click.Context, config: str | None, as_json: bool) -> None:
    """List the components, commands and endpoints of all plugins, and the plugins that cannot be used."""
    if context.invoked_subcommand is not None:
        return
    registry = load_registry(config)
    if as_json:
        click.echo(json.dumps(_to_dict(registry), indent=2))
    else:
        _print(registry)


plugins.add_command(why)


def _to_dict(registry: "Registry") -> dict[str, Any]:
    from whet.component import KINDS

    beside = besides(registry)
    return {
        "components": {
            kind: {name: offer.distribution for name, offer in registry.offers(kind).items()} for kind in KINDS
        },
        "commands": {one.name: one.distribution for one in beside if one.kind == "commands"},
        "endpoints": [one.distribution for one in beside if one.kind == "endpoints"],
        "contested": {
            kind: {name: [offer.distribution for offer in offers] for name, offers in registry.contested(kind).items()}
            for kind in KINDS
        },
        "broken": [
            {"name": broken.name, "distribution": broken.distribution, "reason": broken.reason}
            for broken in registry.broken
        ],
    }


def _print(registry: "Registry") -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)
    if registry.sources:
        _print_components(registry, console)
    else:
        click.echo("\n".join(_to_install()))
    for broken in registry.broken:
        console.print(f"\nnot usable: {broken}", soft_wrap=True)


def _to_install() -> "Iterator[str]":
    """Yield what can be installed, for a user who has only core."""
    from whet.plugins.catalog import bundle_words, catalog

    found = catalog()
    yield "No plugin is installed: core alone trains nothing. Bundles bring what a first run needs:\n"
    commands = {bundle_words(name): held for name, held in found.bundles.items()}
    yield from _columns((click.style(command, bold=True), ", ".join(held)) for command, held in commands.items())
    yield "\nEach plugin can be installed alone, `pip install NAME`:\n"
    yield from _columns((click.style(name, bold=True), about) for name, about in found.distributions.items())
    yield "\n`whet plugins why NAME` says who offers a name."


def _columns(rows: "Iterable[tuple[str, str]]") -> "Iterator[str]":
    """Yield lines of two columns. The second column is folded."""
    table = list(rows)
    width = max(len(click.unstyle(first)) for first, _ in table)
    for first, second in table:
        begin, *rest = textwrap.wrap(second, max(100 - width, 40), break_on_hyphens=False) or [""]
        yield f"  {first}{' ' * (width - len(click.unstyle(first)))}  {begin}"
        yield from (f"  {' ' * width}  {line}" for line in rest)


def _print_components(registry: "Registry", console: "Console") -> None:
    from rich.table import Table

    from whet.component import KINDS
    from whet.config.explain import summary

    table = Table(box=None, pad_edge=False)
    for heading in ("kind", "use", "distribution", "what it is"):
        table.add_column(heading, overflow="fold")
    for kind in KINDS:
        for name, offer in registry.offers(kind).items():
            table.add_row(kind, name, offer.distribution, summary(offer.component.config))
    for one in besides(registry):
        table.add_row(*one)
    console.print(table)
    for kind in KINDS:
        for name, offers in registry.contested(kind).items():
            owners = " and ".join(offer.distribution for offer in offers)
            console.print(f"\noffered twice: {kind} {name!r} by {owners}", soft_wrap=True)
