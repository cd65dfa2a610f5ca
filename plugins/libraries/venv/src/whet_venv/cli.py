"""`whet env`: Python environments for roles whose engine needs its own."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from whet.cli.command import Command, Group, say


@click.group(cls=Group, short_help="Make Python environments for engines.")
def env() -> None:
    """Make, list and remove Python environments. `cluster.python` names them."""


@env.command(cls=Command)
@click.argument("name")
@click.option("--install", "wanted", multiple=True, help="A plugin, or any other requirement; by default whet-NAME.")
@click.option("--variant", default="", help="One of the first plugin's variants, e.g. cpu; by default its first.")
@click.option("--constraints", type=click.Path(), help="A constraints file, instead of the plugin's own.")
@click.option("--remove", "removed", multiple=True, help="A package to uninstall after the installation.")
@click.option("--python", default="", help="The base interpreter; by default that of `whet`.")
@click.option(
    "--with", "tool", type=click.Choice(["pip", "uv"]), help="The installer; by default uv, if it is installed."
)
def create(
    name: str, wanted: tuple[str, ...], variant: str, constraints: str | None, removed: tuple[str, ...], python: str,
    tool: Any,
) -> None:  # fmt: skip
    """Make the environment NAME for a plugin whose engine needs an environment of its own.

    It gets core and the plugin in their present versions, the packages that the plugin lists for its engine, and a
    record of all versions. `cluster.python: {generator: NAME}` then runs the workers of a role in it. Its folder is in
    `WHET_ENVIRONMENTS`, by default `~/.local/share/whet/environments`.
    """
    from attrs import evolve

    from whet_venv import venvs

    first, *others = wanted or (f"whet-{name}",)
    recipe = venvs.recipe_of(first, variant)
    recipe = evolve(
        recipe, plugins=(first, *others), constraints=Path(constraints) if constraints else recipe.constraints,
        remove=(*recipe.remove, *removed),
    )  # fmt: skip
    record = venvs.create(name, recipe, python=python, tool=tool, say=say)
    click.echo(f"made {name}: {_summary(record)}\nuse it: cluster.python: {{generator: {name}}}")


@env.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def list_(as_json: bool) -> None:
    """List the environments that `whet env create` has made, and their contents."""
    from whet.runtime.interpreters import environments
    from whet_venv.venvs import listed

    found = listed()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        _print(found)
    else:
        click.echo(f"no environments in {environments()}; `whet env create NAME` makes one")


@env.command(cls=Command)
@click.argument("name")
def remove(name: str) -> None:
    """Remove the environment NAME."""
    from whet_venv.venvs import remove as remove_environment

    click.echo(f"removed {remove_environment(name)}")


def _print(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what is in it", "made", "folder"):
        table.add_column(heading, overflow="fold")
    for record in found:
        table.add_row(record["name"], _summary(record), record.get("made", "")[:10], record["folder"])
    console.print(table)


def _summary(record: dict[str, Any]) -> str:
    from whet.installed import normal
    from whet.runtime.interpreters import LIBRARIES, engines
    from whet_venv.venvs import is_foreign

    if "packages" not in record:
        foreign = is_foreign(Path(record["folder"]))
        return "not made by `whet env create`: move it away" if foreign else "not finished: make it again, or remove it"
    wanted = LIBRARIES - {"numpy", "tokenizers", "safetensors"} | engines()
    shown = {
        name: version for name, version in record["packages"].items()
        if normal(name).startswith("whet") or normal(name) in wanted
    }  # fmt: skip
    return ", ".join([f"Python {record['python']}", *(f"{name} {version}" for name, version in shown.items())])
