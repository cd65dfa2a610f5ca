"""`whet new`: write a whole installable package to start from."""

import re
from pathlib import Path
from string import Template

import click

from whet.cli.command import Command
from whet.errors import WhetError

TEMPLATES = Path(__file__).parent / "templates"


@click.group()
def new() -> None:
    """Write a new package to start from."""


@new.command(cls=Command)
@click.argument("name")
@click.option("--into", type=click.Path(file_okay=False), default=".", help="The folder that it is put into.")
def environment(name: str, into: str) -> None:
    """Write the package whet-env-NAME: an environment with its config, tests and a recipe."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise click.UsageError(f"{name!r} is no name for an environment; use lower-case words with dashes")
    folder = Path(into) / f"whet-env-{name}"
    if folder.exists():
        raise WhetError(f"{folder} exists already; remove it or choose another name")
    for path in write(TEMPLATES / "environment", folder, _words(name)):
        click.echo(path)
    click.echo(f"\nnext:  pip install -e {folder}  &&  pytest {folder}")


def write(templates: Path, folder: Path, words: dict[str, str]) -> list[Path]:
    """Fill in all templates of a tree, in contents and names; give the files that were written."""
    written = []
    for template in sorted(templates.rglob("*.template")):
        name = Template(str(template.relative_to(templates)).removesuffix(".template")).substitute(words)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
        written.append(path)
    return written


def _words(name: str) -> dict[str, str]:
    import whet

    major, minor, *_ = whet.__version__.split(".")
    return {
        "name": name,
        "distribution": f"whet-env-{name}",
        "package": f"whet_env_{name.replace('-', '_')}",
        "title": "".join(word.capitalize() for word in name.split("-")),
        "core": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }
