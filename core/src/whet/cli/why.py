"""`whet plugins why`: how a name was found, or why it was not."""

import inspect
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, NamedTuple

import click

from whet.cli.command import Command, load_registry, registry_option
from whet.cli.commands import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from whet.component import Kind
    from whet.plugins.registry import Broken, Offer, Registry

IMPORT_SECONDS = 120.0
"""Longest time that the import of a target may take."""


class Found(NamedTuple):
    """One component with the requested name."""

    kind: "Kind"
    name: str
    distribution: str
    version: str
    plugin: str
    """Name of the entry point, or the stem of a single file."""
    module: str
    """The module that the entry point names; empty for a single file."""
    summary: str
    config: str
    """The class with the component's keys: import path, file and line."""
    target: str
    facts: str
    contested: tuple[str, ...]
    """Distributions that offer the same name too, so that no config can use it."""
    fault: str = ""
    """Why the target cannot be imported. Empty: it can."""


class Beside(NamedTuple):
    """What a distribution offers beside components: a command, or endpoints."""

    kind: str
    name: str
    distribution: str
    summary: str


def besides(registry: "Registry") -> list[Beside]:
    """Return the commands of installed distributions, and the plugins that open endpoints."""
    from whet.plugins.endpoints import FEATURE, HOOK

    commands = [Beside("commands", offer.entry.name, offer.owner, offer.about) for offer in installed()]
    endpoints = [Beside("endpoints", FEATURE, owner, "Addresses of the model.") for owner in registry.targets(HOOK)]
    return sorted(commands) + sorted(endpoints)


@click.command(cls=Command)
@click.argument("name")
@registry_option
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def why(name: str, config: str | None, as_json: bool) -> int:
    """Show how NAME was found, or why it was not.

    NAME is a component, KIND/COMPONENT, a distribution, or a command of one.

    The target of each component is imported in a process of its own. Exit code 1: no config can use the name.
    """
    registry = load_registry(config)
    found = [_checked(one) for one in _found(registry, name)]
    beside = [one for one in besides(registry) if name in (one.name, f"{one.kind}/{one.name}", one.distribution)]
    suspected = not (found or beside) or name in {broken.distribution for broken in registry.broken}
    broken = _suspects(registry, name) if suspected else []
    if as_json:
        import attrs

        document = {
            "found": [one._asdict() for one in found],
            "beside": [one._asdict() for one in beside],
            "broken": [attrs.asdict(one) for one in broken],
            "near": [] if found or beside else _near(registry, name),
            "elsewhere": [] if found or beside else [f"{title} ({owner})" for title, owner in registry.elsewhere(name)],
        }
        click.echo(json.dumps(document, indent=2))
    elif found or beside:
        words = [f"{click.style(f'{one.kind}/{one.name}', bold=True)}: {one.summary}" for one in beside]
        owners = [f"{line}\n  offered by  {one.distribution}" for line, one in zip(words, beside, strict=True)]
        click.echo("\n\n".join(["\n".join(_described(one)) for one in found] + owners))
    else:
        click.echo("\n".join(_missing(registry, name, config)))
    if broken and not as_json:
        click.echo("\n".join(_quoted(broken)))
    return 0 if (found or beside) and not any(one.fault or one.contested for one in found) else 1


def _found(registry: "Registry", name: str) -> "Iterator[Found]":
    for kind, offers in _every(registry):
        for offer in offers:
            component = offer.component
            if name in (component.name, f"{kind}/{component.name}", offer.distribution):
                others = tuple(other.distribution for other in offers if other is not offer)
                yield _describe(kind, offer, others)


def _every(registry: "Registry") -> "Iterator[tuple[Kind, list[Offer]]]":
    """Yield the offers of each name of each kind."""
    from whet.component import KINDS

    for kind in KINDS:
        names = {name: [offer] for name, offer in registry.offers(kind).items()} | registry.contested(kind)
        for _, offers in sorted(names.items()):
            yield kind, offers


def _describe(kind: "Kind", offer: "Offer", others: tuple[str, ...]) -> Found:
    from whet.config.explain import summary

    component, source = offer.component, offer.source
    return Found(
        kind, component.name, offer.distribution, source.version, source.name, source.module,
        summary(component.config), _place(component.config), component.target, component.facts, others,
    )  # fmt: skip


def _place(cls: type) -> str:
    try:
        file, line = inspect.getsourcefile(cls), inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):  # made without a file
        return f"{cls.__module__}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__} ({file}, line {line})"


def _checked(found: Found) -> Found:
    """Import the target in a process of its own, where it can neither hang nor harm this one. Return the result."""
    code = (
        "import sys\nfrom whet.component import resolve\nfrom whet.errors import WhetError\n"
        "try:\n    resolve(sys.argv[1])\nexcept WhetError as error:\n    sys.exit(str(error))"
    )
    command = [sys.executable, "-P", "-c", code, found.target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return found._replace(fault=f"its import took longer than {IMPORT_SECONDS:g} s")
    words = done.stderr.strip().rpartition("\n")[2] or f"its import ended with the code {done.returncode}"
    return found._replace(fault=words) if done.returncode else found


def _described(found: Found) -> "Iterator[str]":
    yield f"{click.style(f'{found.kind}/{found.name}', bold=True)}: {found.summary}"
    if found.module:
        about = f"{found.distribution} {found.version}, entry point {found.plugin} = {found.module}"
    else:
        about = f"the single file {found.distribution}"
    yield f"  offered by  {about}"
    if found.contested:
        others = " and ".join(found.contested)
        yield f"  contested   {others} offers it too, so no config can use it; remove all but one of them"
    yield f"  target      {found.target}: {found.fault or 'it can be imported'}"
    if found.facts:
        yield f"  facts       {found.facts}"
    yield f"  keys        {found.config}"
    yield f"              whet schema {found.kind}/{found.name}"


def _missing(registry: "Registry", name: str, config: str | None) -> "Iterator[str]":
    from whet.plugins.catalog import install_words

    yield f"no usable plugin offers {name!r}"
    elsewhere = [*registry.elsewhere(name), *_commands_elsewhere(name)]
    for owner in dict.fromkeys(owner for _, owner in elsewhere):
        offers = ", ".join(title for title, other in elsewhere if other == owner)
        yield f"{owner} offers {offers}, and is not installed: {install_words([owner])}"
    if not elsewhere and (near := _near(registry, name)):
        yield f"near names: {', '.join(near)}"
    sources = {offer.distribution for _, offers in _every(registry) for offer in offers}
    yield f"plugins that were found: {', '.join(sorted(sources)) or 'none'}"
    if config is None:
        yield "single-file plugins belong to a config: `--config FILE` also looks at those that it names"


def _commands_elsewhere(name: str) -> "Iterator[tuple[str, str]]":
    """Yield the command and the distribution that a name means, where it is not installed."""
    from whet.plugins.catalog import catalog

    for command, owner in catalog().commands.items():
        if name in (command, f"commands/{command}", owner):
            yield f"the command {command!r}", owner


def _near(registry: "Registry", name: str) -> list[str]:
    import difflib

    from whet.plugins.catalog import catalog

    names = {
        name: f"{kind}/{name} ({owner}, not installed)"
        for kind, owners in catalog().components.items() for name, owner in owners.items() if owner not in registry.here
    }  # fmt: skip
    for kind, (offer, *_) in _every(registry):
        names |= {offer.component.name: f"{kind}/{offer.component.name} ({offer.distribution})"}
    close = difflib.get_close_matches(name.rpartition("/")[2], names, n=3, cutoff=0.6)
    return [names[one] for one in close]


def _suspects(registry: "Registry", name: str) -> "list[Broken]":
    """Return the broken plugins that might offer the name, or whose distribution it names."""
    kind = name.rpartition("/")[0]
    named = [broken for broken in registry.broken if broken.distribution == name]
    return named or [broken for broken in registry.broken if not kind or broken.kind in (None, kind)]


def _quoted(broken: "list[Broken]") -> "Iterator[str]":
    yield "not usable, and might offer it:"
    for one in broken:
        yield f"  {one}"
        if one.last_lines:
            yield textwrap.indent(one.last_lines, "      ")
