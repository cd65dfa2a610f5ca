"""`whet new`: write an installable package to start from."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

import click

from whet.cli.command import Command
from whet.data.files import disk_errors
from whet.errors import WhetError

if TYPE_CHECKING:
    from whet.component import Kind

TEMPLATES = Path(__file__).parent / "templates"
"""This folder has a folder of templates for each kind of component. The folder `every` is for all kinds."""

_TORCH = '"torch>=2.8"'
_DATA = '"whet-data>=0.1,<0.2"'
_OPENAI = '"whet-endpoint>=0.1,<0.2", "openai>=1.50"'
_OPS = f'"whet-ops>=0.1,<0.2", {_TORCH}'
_TRANSFORMERS = f'"whet-weights[torch]>=0.1,<0.2", {_TORCH}, "transformers>=5.0"'
_STEPS = f'"whet-ops>=0.1,<0.2", {_TRANSFORMERS}, "safetensors>=0.5"'
_SANDBOX = '"whet-sandbox>=0.1,<0.2"'
_REPLICAS = f'"whet-generation>=0.1,<0.2", {_TRANSFORMERS}'


class _Start(NamedTuple):
    """The parts of the package that `whet new` writes for one kind of component."""

    kind: "Kind"
    what: str
    """Name of the component with an article, capitalized to begin a sentence."""
    about: str
    """Description of the package as written."""
    needs: str = ""
    """Dependencies of the package beside whet, written as in a `pyproject.toml`."""
    prefix: str = ""
    """Part of the distribution's name between `whet-` and the name."""


STARTS: dict[str, _Start] = {
    "environment": _Start(
        "environments", "An environment", "questions that are made up, and graded by the last number", "", "env-"
    ),
    "reward": _Start("rewards", "A reward", "responses of a single line, in any environment", _DATA, "reward-"),
    "agent": _Start(
        "environments", "An environment for a foreign agent", "a program that calls OpenAI's API plays", _OPENAI, "env-"
    ),
    "backend": _Start("backends", "A backend", "plain PyTorch in one process", _STEPS),
    "generator": _Start("generators", "A generator", "transformers models, a request at a time", _REPLICAS),
    "loss": _Start("losses", "A loss", "REINFORCE with truncated importance weights", _TORCH),
    "algorithm": _Start("algorithms", "An algorithm", "REINFORCE with a leave-one-out baseline, on a page", _OPS),
    "advantages": _Start(
        "advantages", "An advantage estimator", "a baseline between the means of group and batch"
    ),
    "filter": _Start("filters", "A filter", "groups neither too hard nor too easy are kept"),
    "logger": _Start("loggers", "A logger", "a CSV file"),
    "sandbox": _Start("sandboxes", "A sandbox", "programs run behind a command, e.g. on another machine", _SANDBOX),
    "hook": _Start("hooks", "A hook", "a file that tells when a metric reaches a value"),
}  # fmt: skip


@click.group(short_help="Write a package to start from.")
def new() -> None:
    """Write a new package to start from. Its tests pass before you change anything."""


def _command(word: str, start: _Start) -> click.Command:
    def make(name: str, into: str) -> None:
        _make(word, start, name, Path(into))

    text = f"Write the package whet-{start.prefix}NAME with {start.what[0].lower()}{start.what[1:]}: {start.about}."
    arguments = [
        click.Argument(["name"]),
        click.Option(["--into"], type=click.Path(file_okay=False), default=".", help="The folder for the package."),
    ]
    return Command(word, callback=make, params=arguments, help=text)


for _word, _start in STARTS.items():
    new.add_command(_command(_word, _start))


def _make(word: str, start: _Start, name: str, into: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise click.UsageError(f"{name!r} is no name for {start.what.lower()}; use lower-case words with dashes")
    folder = into / f"whet-{start.prefix}{name}"
    if folder.exists():
        raise WhetError(f"{folder} exists already; remove it or choose another name")
    _refuse_taken(folder.name)
    _warn_if_taken(start.kind, name)
    for path in _write_whole([TEMPLATES / "every", TEMPLATES / word], folder, _words(start, name)):
        click.echo(path)
    click.echo(f"\nnext:  pip install -e '{folder}[testing]'  &&  pytest {folder}")


def _refuse_taken(distribution: str) -> None:
    """Raise `WhetError` if the package would take the place of one that whet ships or that this Python has."""
    from whet.installed import versions
    from whet.plugins.catalog import catalog

    package = distribution.replace("-", "_")
    if distribution in catalog().distributions:
        raise WhetError(f"{distribution} is a distribution of whet; choose another name")
    if distribution in versions():
        raise WhetError(f"{distribution} is installed already; remove it or choose another name")
    if spec := find_spec(package):
        raise WhetError(f"{package} is imported from {spec.origin or 'a folder'} already; choose another name")


def _warn_if_taken(kind: "Kind", name: str) -> None:
    """Warn if a distribution offers the name already. With both installed, a config must name the distribution."""
    from whet.config.messages import kind_word
    from whet.plugins.registry import load_plugins

    registry = load_plugins()
    offers = registry.contested(kind).get(name, [])
    if name in registry.offers(kind):
        offers = [registry.offers(kind)[name]]
    if offers:
        owners = " and ".join(offer.distribution for offer in offers)
        click.echo(
            f"warning: the {kind_word(kind)} {name!r} is offered by {owners} already; with both installed, configs "
            f"must say `use: DISTRIBUTION/{name}`, so another name is better",
            err=True,
        )


def _write_whole(trees: list[Path], folder: Path, words: dict[str, str]) -> list[Path]:
    """Write the templates of some trees into a folder that is moved to its place when it is whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        with disk_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            written = [path for tree in trees for path in write(tree, partial, words)]
            partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [folder / path.relative_to(partial) for path in written]


def write(templates: Path, folder: Path, words: dict[str, str]) -> list[Path]:
    """Fill in the contents and names of all templates of a tree. Return the written files."""
    written = []
    for template in sorted(templates.rglob("*.template")):
        name = Template(str(template.relative_to(templates)).removesuffix(".template")).substitute(words)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
        written.append(path)
    return written


def _words(start: _Start, name: str) -> dict[str, str]:
    from whet.component import CORE_VERSION

    major, minor, *_ = CORE_VERSION.split(".")
    core = f">={major}.{minor},<{major}.{int(minor) + 1}"
    return {
        "name": name,
        "what": start.what,
        "distribution": f"whet-{start.prefix}{name}",
        "package": f"whet-{start.prefix}{name}".replace("-", "_"),
        "entry": f"{start.prefix}{name}",
        "title": "".join(word.capitalize() for word in name.split("-")),
        "dependencies": ", ".join(filter(None, (f'"whet{core}"', start.needs))),
        "testing": f'"whet-testing[torch]{core}"' if _TORCH in start.needs else f'"whet-testing{core}"',
    }
