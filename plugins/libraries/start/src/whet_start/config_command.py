"""`whet config explain`: where the values of a config come from."""

import json
import textwrap
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command, warn_of_broken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from whet_start.sources import Setting


@click.group()
def config() -> None:
    """Explain the keys of a config: value, origin, meaning."""


@config.command(cls=Command)
@click.argument("config", type=click.Path())
@click.argument("words", nargs=-1, metavar="[KEY] [KEY.PATH=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def explain(config: str, words: tuple[str, ...], as_json: bool) -> None:
    """Explain KEY of CONFIG: its value, where it comes from, what it means and which values are allowed.

    Without KEY, print every value of the effective config with its source. Overrides count as they do in `whet run`.
    """
    import attrs

    from whet.plan.load import load_config
    from whet_start.sources import explain as explained
    from whet_start.sources import settings

    keys, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    if len(keys) > 1:
        raise click.UsageError(f"one key at a time; found {', '.join(keys)}")
    loaded = load_config(config, overrides)
    warn_of_broken(loaded.registry)
    found = explained(loaded, keys[0]) if keys else settings(loaded)
    if as_json:
        click.echo(json.dumps([attrs.asdict(setting) for setting in found], indent=2, default=str))
    elif keys and len(found) == 1:
        click.echo("\n".join(_lines(found[0], config)))
    else:
        click.echo("\n".join(_rows(found)))


def _lines(setting: "Setting", config: str) -> "Iterator[str]":
    """Yield lines with everything about one key."""
    from whet.config.document import to_line

    yield f"{click.style(setting.key, bold=True)} = {to_line(setting.value)}"
    if setting.doc:
        yield textwrap.fill(setting.doc, 100, initial_indent="    ", subsequent_indent="    ")
    yield f"    {', '.join(filter(None, (setting.type, setting.allowed)))}; a key of {setting.owner}"
    yield f"from {'the default of its class' if setting.origin.kind == 'default' else setting.origin}"
    for origin in setting.origins[1:]:
        value = origin.value if origin.kind == "default" else to_line(origin.value)
        yield f"replaces {value or 'what the class makes'} ({origin})"
    yield f"to change it: {_change(setting, config)}"


def _change(setting: "Setting", config: str) -> str:
    match setting.origin.kind:
        case "override":
            next_one = f"that of {setting.origins[1]}" if len(setting.origins) > 1 else "nothing"
            return f"another value in the override; without it, {next_one} holds"
        case "file":
            return f"{setting.origin}, or {setting.key}=VALUE on the command line"
        case "extends":
            return f"set it in {config}, which comes before {setting.origin.name}, or {setting.key}=VALUE"
    return f"set it in {config}, or {setting.key}=VALUE on the command line"


def _rows(found: "Sequence[Setting]") -> "Iterator[str]":
    """Yield a line for each key: key, value, source."""
    from whet.config.document import to_line

    rows = [(setting.key, to_line(setting.value), str(setting.origin)) for setting in found]
    width = max(len(key) for key, _, _ in rows)
    values = min(40, max(len(value) for _, value, _ in rows))
    for key, value, origin in rows:
        yield f"{click.style(key.ljust(width), bold=True)}  {value.ljust(values)}  {origin}"
