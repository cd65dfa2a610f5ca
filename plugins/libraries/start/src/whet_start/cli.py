"""`whet recipe`: write a recipe that an installed plugin ships, to change and run."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whet.cli.command import Command, warn_of_broken

if TYPE_CHECKING:
    from whet.plugins.registry import Registry
    from whet_start.recipes import Recipe

OF_RUNS = ("runs/", "models/")
"""Folders in recipes that hold the results of other runs."""


@click.command("recipe", cls=Command, short_help="Write a recipe to start from.")
@click.argument("name", required=False)
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=".", help="The folder for it.")
def recipe(name: str | None, into: Path) -> None:
    """Write the recipe NAME, a YAML file to change and run. Without NAME, list the recipes of all plugins."""
    from whet.plugins.registry import load_plugins
    from whet_start.recipes import recipe as find

    registry = load_plugins()
    warn_of_broken(registry)
    if name is None:
        _list(registry)
        return
    written = write(find(registry, name.removesuffix(".yaml")), into)
    for path in written:
        click.echo(path)
    click.echo("\n" + "\n".join(_next(written[0], registry)))


def write(found: "Recipe", into: Path) -> list[Path]:
    """Write a recipe and the recipes that it extends. Return the files. Raises `WhetError` if a file would be
    replaced.
    """
    from whet.errors import WhetError
    from whet_start.recipes import with_bases

    name = found.name
    head = (
        f"# Written by `whet recipe {name}`, from {found.distribution} {found.version}.\n"
        "# It states what differs from the defaults:\n"
        f"# `whet config explain {name}.yaml` shows all keys, `whet check {name}.yaml` finds mistakes.\n"
    )
    texts = {into / file.name: file.read_text(encoding="utf-8") for file in with_bases(found)}
    kept = {path for path, text in texts.items() if path.exists() and path.read_text(encoding="utf-8") == text}
    for path in texts.keys() - kept:
        if path.exists():
            raise WhetError(f"{path} exists already; remove it, or choose another folder: --into FOLDER")
    for number, (path, text) in enumerate(texts.items()):
        if path not in kept:
            _write_whole(path, text if number else head + text)
    return list(texts)


def _write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from whet.data.files import disk_errors

    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _list(registry: "Registry") -> None:
    from rich.console import Console
    from rich.table import Table

    from whet.plugins.catalog import catalog, install_words
    from whet_start.recipes import recipes

    found = recipes(registry)
    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "distribution", "what it is"):
        table.add_column(heading, overflow="fold")
    for one in found.values():
        table.add_row(one.name, one.distribution, one.about)
    console.print(table if found else "no installed plugin ships a recipe")
    missing: dict[str, list[str]] = {}
    for name, owner in catalog().recipes.items():
        if name not in found:
            missing.setdefault(owner, []).append(name)
    if missing:
        click.echo("\nnot installed:")
        for owner, names in missing.items():
            click.echo(f"  {install_words([owner])}: {', '.join(names)}")
    if found:
        click.echo("\n`whet recipe NAME` writes one here.")


def _next(path: Path, registry: "Registry") -> Iterator[str]:
    """Yield what is missing before a recipe can run, and the commands to run it."""
    from whet.cli.command import message
    from whet.errors import ConfigError
    from whet.plan.load import load_config

    document: dict[str, Any] = {}
    try:
        document = load_config(path, registry=registry).document
    except ConfigError as error:
        yield f"it cannot run here yet: {message(error)}"
    if absent := list(_absent(document)):
        yield "it names what is not here; put yours in its place, in the file or on the command line:"
        yield from (f"  {key}={value}" for key, value in absent)
    yield f"next:  whet check {path}  &&  whet run {path}"


def _absent(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths to models and data that do not exist here. Names on a hub are ignored."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _absent(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _absent(inner, f"{key}.{number}")
    elif key.rpartition(".")[2] in ("path", "dataset") and isinstance(value, str) and _is_absent(value):
        yield key, value


def _is_absent(path: str) -> bool:
    on_a_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None and not path.startswith(OF_RUNS)
    return not on_a_hub and not Path(path).exists()
