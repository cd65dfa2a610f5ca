"""`whet plugins`: what installed plugins offer, and which cannot be used. `whet plugins why`: all about a name."""

import inspect
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from whet.cli.command import Command, Group
from whet.cli.commands import installed
from whet_start.explain import summary
from whet_start.registry_option import elsewhere, load_registry, registry_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from whet.plugins.registry import Broken, Offer, Registry

IMPORT_SECONDS = 120.0
"""Longest time that the import of a target may take."""


class Row(NamedTuple):
    """One component, command or endpoint of a distribution."""

    kind: str
    name: str
    distribution: str
    summary: str
    offer: "Offer | None" = None
    """None for a command and an endpoint."""
    contested: tuple[str, ...] = ()
    """Distributions that offer a component of the same name too, so that only DISTRIBUTION/NAME chooses this one."""

    @property
    def title(self) -> str:
        """Return KIND/NAME."""
        return f"{self.kind}/{self.name}"


def offered(registry: "Registry") -> list[Row]:
    """Return what all installed plugins offer, kind by kind."""
    from whet.component import KINDS
    from whet.plugins.endpoints import FEATURE, HOOK

    rows = []
    for kind in KINDS:
        for use, offer in registry.offers(kind).items():
            alike = registry.contested(kind).get(offer.component.name, [])
            others = tuple(other.distribution for other in alike if other is not offer)
            rows.append(Row(kind, use, offer.distribution, summary(offer.component.config), offer, others))
    commands = [Row("commands", command.entry.name, command.owner, command.about) for command in installed()]
    endpoints = [Row("endpoints", FEATURE, owner, "Addresses of the model.") for owner in registry.targets(HOOK)]
    return [*rows, *sorted(commands), *sorted(endpoints)]


@click.group(cls=Group, invoke_without_command=True)
@registry_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_context
def plugins(context: click.Context, config: str | None, as_json: bool) -> None:
    """List the components, commands and endpoints of all plugins, and the plugins that cannot be used."""
    if context.invoked_subcommand is not None:
        return
    registry = load_registry(config)
    rows = offered(registry)
    document = _by_kind(rows, registry.broken)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    if registry.sources:
        _print_table(("kind", "use", "distribution", "what it is"), (row[:4] for row in rows))
    else:
        _print_what_to_install()
    for kind, names in document["contested"].items():
        for name, owners in names.items():
            click.echo(f"\noffered twice: {kind} {name!r} by {' and '.join(owners)}")
    for broken in registry.broken:
        click.echo(f"\nnot usable: {broken}")


def _by_kind(rows: "Sequence[Row]", broken: "Sequence[Broken]") -> dict[str, Any]:
    from whet.component import KINDS

    usable: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    contested: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for row in rows:
        if row.offer and row.contested:
            contested[row.kind].setdefault(row.offer.component.name, []).append(row.distribution)
        if row.offer:
            usable[row.kind][row.name] = row.distribution
    return {
        "components": usable,
        "commands": {row.name: row.distribution for row in rows if row.kind == "commands"},
        "endpoints": [row.distribution for row in rows if row.kind == "endpoints"],
        "contested": contested,
        "broken": [{"name": one.name, "distribution": one.distribution, "reason": one.reason} for one in broken],
    }


def _print_table(headings: "Sequence[str]", rows: "Iterable[Sequence[str]]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120).print(table)


def _print_what_to_install() -> None:
    """Print what can be installed, for a user who has only core."""
    from whet.plugins.catalog import bundle_words, catalog

    click.echo("No plugin is installed: core alone trains nothing. Bundles bring what a first run needs:\n")
    _print_table(("", ""), ((f"  {bundle_words(name)}", ", ".join(held)) for name, held in catalog().bundles.items()))
    click.echo("\nEach plugin can be installed alone, `pip install NAME`:\n")
    _print_table(("", ""), ((f"  {name}", about) for name, about in catalog().distributions.items()))
    click.echo("\n`whet plugins why NAME` shows who offers a name.")


@plugins.command(cls=Command)
@click.argument("name")
@registry_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def why(name: str, config: str | None, as_json: bool) -> int:
    """Show how NAME was found, or why it was not.

    NAME is a component, KIND/COMPONENT, a distribution, or a command of one.

    The target of each component is imported in a process of its own. Exit code 1: no config can use the name.
    """
    import attrs

    registry = load_registry(config)
    rows = offered(registry)
    named = [row for row in rows if name == row.distribution or f"/{row.title}".endswith(f"/{name}")]
    found = [_component(row, row.offer) for row in named if row.offer]
    beside = [dict(zip(Row._fields[:4], row, strict=False)) for row in named if row.offer is None]
    broken = _suspects(registry, name, bool(named))
    others = [] if named else [*elsewhere(registry, name), *_commands_elsewhere(name)]
    near = [] if named else _near(registry, rows, name)
    if as_json:
        not_here = [f"{title} ({owner})" for title, owner in others]
        lists = {"broken": [attrs.asdict(one) for one in broken], "near": near, "elsewhere": not_here}
        click.echo(json.dumps({"found": found, "beside": beside, **lists}, indent=2))
    else:
        blocks = ["\n".join(_described(one)) for one in [*found, *beside]]
        text = "\n\n".join(blocks) if named else "\n".join(_missing(name, rows, others, near, config))
        click.echo("\n".join([text, *_quoted(broken)]))
    return 0 if named and not any(one["fault"] or (one["contested"] and "/" not in name) for one in found) else 1


def _component(row: Row, offer: "Offer") -> dict[str, Any]:
    """Return all about a component. `fault` is why its target cannot be imported; empty: it can."""
    source, component = offer.source, offer.component
    return {
        "kind": row.kind, "name": row.name, "distribution": row.distribution, "version": source.version,
        "plugin": source.name, "module": source.module, "summary": row.summary, "config": _place(component.config),
        "target": component.target, "facts": component.facts, "contested": row.contested,
        "fault": _fault(component.target),
    }  # fmt: skip


def _place(cls: type) -> str:
    """Return the import path of a class, with file and line where it has them."""
    try:
        file, line = inspect.getsourcefile(cls), inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):  # made without a file
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__} ({file}, line {line})"


def _fault(target: str) -> str:
    """Import a target in a process of its own, where it can neither hang nor harm this one. Return what is wrong."""
    code = (
        "import sys\nfrom whet.component import resolve\nfrom whet.errors import WhetError\n"
        "try:\n    resolve(sys.argv[1])\nexcept WhetError as error:\n    sys.exit(str(error))"
    )
    command = [sys.executable, "-P", "-c", code, target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its import took longer than {IMPORT_SECONDS:g} s"
    words = done.stderr.strip().rpartition("\n")[2] or f"its import ended with the code {done.returncode}"
    return words if done.returncode else ""


def _described(one: "Mapping[str, Any]") -> "Iterator[str]":
    yield f"{click.style('{kind}/{name}'.format(**one), bold=True)}: {one['summary']}"
    if "target" not in one:
        yield f"  offered by  {one['distribution']}"
        return
    installed = "{distribution} {version}, entry point {plugin} = {module}".format(**one)
    yield f"  offered by  {installed if one['module'] else 'the single file ' + one['distribution']}"
    if one["contested"]:
        others = " and ".join(one["contested"])
        yield f"  contested   {others} offers it too; choose this one by `use: {one['name']}`"
    yield f"  target      {one['target']}: {one['fault'] or 'it can be imported'}"
    if one["facts"]:
        yield f"  facts       {one['facts']}"
    yield f"  keys        {one['config']}"


def _missing(
    name: str, rows: "Iterable[Row]", others: "Sequence[tuple[str, str]]", near: "Sequence[str]", config: str | None
) -> "Iterator[str]":
    from whet.plugins.catalog import install_words

    yield f"no usable plugin offers {name!r}"
    for owner in dict.fromkeys(owner for _, owner in others):
        offers = ", ".join(title for title, other in others if other == owner)
        yield f"{owner} offers {offers}, and is not installed: {install_words([owner])}"
    if near and not others:
        yield f"near names: {', '.join(near)}"
    sources = {row.distribution for row in rows if row.offer}
    yield f"plugins that were found: {', '.join(sorted(sources)) or 'none'}"
    if config is None:
        yield "single-file plugins belong to a config: `--config FILE` also looks at those that it names"
    else:
        yield f"of single-file plugins those were looked at that {config} lists under `plugins:`; add yours there"


def _commands_elsewhere(name: str) -> "Iterator[tuple[str, str]]":
    """Yield the command and the distribution that a name means, where it is not installed."""
    from whet.plugins.catalog import catalog

    for command, owner in catalog().commands.items():
        if name in (command, f"commands/{command}", owner):
            yield f"the command {command!r}", owner


def _near(registry: "Registry", rows: "Iterable[Row]", name: str) -> list[str]:
    """Return the components with the nearest names, installed or not."""
    import difflib

    from whet.plugins.catalog import catalog

    names = {
        name: f"{kind}/{name} ({owner}, not installed)"
        for kind, owners in catalog().components.items() for name, owner in owners.items() if owner not in registry.here
    }  # fmt: skip
    names |= {row.name: f"{row.title} ({row.distribution})" for row in rows if row.offer}
    return [names[one] for one in difflib.get_close_matches(name.rpartition("/")[2], names, n=3, cutoff=0.6)]


def _suspects(registry: "Registry", name: str, is_found: bool) -> "list[Broken]":
    """Return the broken plugins whose distribution the name is, or that might offer a name that was not found."""
    named = [broken for broken in registry.broken if broken.distribution == name]
    kind = name.rpartition("/")[0]
    return named if named or is_found else [one for one in registry.broken if not kind or one.kind in (None, kind)]


def _quoted(broken: "Sequence[Broken]") -> "Iterator[str]":
    if broken:
        yield "not usable, and might offer it:"
    for one in broken:
        yield f"  {one}"
        if one.last_lines:
            yield textwrap.indent(one.last_lines, "      ")
