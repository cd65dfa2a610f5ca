"""Write the reference pages, and what packages ship, from the code: `python docs/generate_reference.py`.

`--check` only compares.
"""

import argparse
import functools
import importlib.util
import inspect
import pkgutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from whet.cli.app import group
from whet.component import KINDS, Kind
from whet.config.sections import Config
from whet.plugins import hookspecs
from whet.plugins.registry import Offer, Registry, load_plugins
from whet_start.explain import FieldDoc, describe, field_docs, summary
from whet_testing import contracts as contract_modules

ROOT = Path(__file__).resolve().parents[1]
NOTICE = "<!-- Written by docs/generate_reference.py. Change the code and run it again. -->\n"

HOOKS = """\
# Hooks

A plugin implements any of these in the module that its entry point in the group `whet` names, marked with
`@whet.hookimpl`, or as methods of an object with settings that the section `hooks` of a config names. Hooks run on the
driver only. They see configs, plain numbers and core records, never a tensor.
[Write your own hooks](../how-to/own-hooks.md) shows how."""
CONFIG = """\
# Config

The sections of a recipe. Precedence: class default < `extends:` file < file < `key.path=value` on the command line. In
paths `N` stands for the position in a list. Where a section takes a component, `use:` chooses it and the keys beside
`use:` are its own: see [Components](components.md)."""
COMPONENTS = """\
# Components

What can stand after `use:`, and where. These pages list what the distributions of this repository offer; `whet plugins`
lists what is installed, and `whet schema NAME` prints the same tables for any of it."""
CONTRACTS = """\
# Contracts as tests

The conformance kit: inherit a class in the tests of a plugin, override the method that builds what is tested, and each
rule below is a test. Needs `pip install whet-testing`; the other helpers are in [Testing](api/testing.md)."""
WHERE = {
    "backends": "`backend:`. It holds the model and takes optimizer steps.",
    "generators": "`generator:`. It continues sequences of tokens: rollouts and evaluation need one.",
    "losses": "`algorithm.loss:`. A pure function of model outputs and a batch.",
    "environments": "`environments:` and `evaluation.environments:`. It gives tasks and plays episodes.",
    "loggers": "`loggers:`. It sees plain numbers after each step, and events if it wants them.",
    "algorithms": "`algorithm:`. It is the loop of a run.",
    "advantages": "`algorithm.advantages:`, of algorithms that compare answers. A pure function of rewards and groups.",
    "filters": "`algorithm.filters:`, of algorithms fed by rollouts. It keeps a group of episodes or leaves it out.",
    "sandboxes": "`sandbox:` of environments that run programs. It makes the places where programs run.",
    "rewards": "`rewards:` of environments that combine them. A function of a finished response.",
    "hooks": "`hooks:`. Its methods are called as the hooks of a plugin, in this run alone.",
}
"""Under which key a component of a kind stands, and what it is for."""


def markdown(fields: Sequence[FieldDoc]) -> str:
    """Return a table of keys."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        default = f"`{field.default}`" if field.default not in ("", "required") else field.default
        cells = (f"`{field.name}`", field.type, default, field.doc)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def pages() -> dict[str, str]:
    """Return the text of each page, and of each file of `packaged.py`, by its path from `docs/reference`."""
    kinds = {kind: offers for kind in KINDS if (offers := list(offered(kind)))}
    made = {"hooks.md": hooks(), "config.md": config(), "cli.md": cli(), "contracts.md": contracts()}
    made["components.md"] = components(kinds)
    made["interfaces.md"] = _beside("signatures").page()
    made["sandbox-escapes.md"] = _beside("sandbox_escapes").page(ROOT)
    made["combinations.md"] = combined(kinds["algorithms"])
    names = ([offer.component.name for offer in kinds[kind]] for kind in ("algorithms", "generators"))
    made["support.md"] = _beside("support").page(registry(), *names)
    made |= {f"components/{kind}.md": one_kind(kind, offers) for kind, offers in kinds.items()}
    packaged = _beside("packaged").files(ROOT, registry())
    outside = {f"../../{name}": text for name, text in packaged.items()}
    return {**{name: f"{NOTICE}\n{text.rstrip()}\n" for name, text in made.items()}, **outside}


def hooks() -> str:
    """Write every hook with its exact signature and docstring."""
    return "\n\n".join([HOOKS, *(hook(function) for function in hook_functions())])


def hook_functions() -> list[Callable[..., Any]]:
    """Return the hook specifications in the order of the module."""
    return [f for name, f in vars(hookspecs).items() if name.startswith("whet_") and inspect.isfunction(f)]


def hook(function: Callable[..., Any]) -> str:
    """Write one hook."""
    text, parameters = _split_parameters(inspect.getdoc(function) or "")
    lines = [f"## `{function.__name__}`", f"```python not run: a signature\n{signature(function)}\n```", text]
    if parameters:
        lines.append("\n".join(f"- `{name}`: {meaning}" for name, meaning in parameters))
    if function.whet_spec["firstresult"]:  # type: ignore[attr-defined]
        lines.append("The first implementation that gives a result ends the call; others can wrap it.")
    return "\n\n".join(lines)


def signature(function: Callable[..., Any]) -> str:
    """Return the signature as one would write it, with bare type names."""
    plain = inspect.signature(function)
    shown = [f"{p.name}: {_annotation(p.annotation)}" for p in plain.parameters.values()]
    return f"def {function.__name__}({', '.join(shown)}) -> {_annotation(plain.return_annotation)}"


def config() -> str:
    """Write every section of a recipe, in the order of the config."""
    docs = field_docs(Config)
    parts = [CONFIG]
    for field in attrs.fields(Config):
        parts += [f"## `{field.alias}`", docs[field.name]]
        rows = [row for row in describe(Config) if row.name.split(".")[0] == field.alias]
        if rows[0].kind and len(rows) == 1:
            kind = f"see [{rows[0].kind.capitalize()}](components/{rows[0].kind}.md)"
            parts.append(f"Wants {rows[0].type}, {kind}. Default: {rows[0].default}.")
        else:
            parts.append(markdown(rows if len(rows) == 1 else rows[1:]).rstrip())
    return "\n\n".join(parts)


def components(kinds: Mapping[str, Sequence[Offer]]) -> str:
    """Write the list of all components."""
    parts = [COMPONENTS]
    for kind, offers in kinds.items():
        rows = [
            f"| [`{offer.component.name}`](components/{kind}.md#{offer.component.name}) "
            f"| {summary(offer.component.config)} | `{offer.distribution}` |"
            for offer in offers
        ]
        head = ["| use | what it is | distribution |", "| --- | --- | --- |"]
        parts += [f"## [{kind.capitalize()}](components/{kind}.md)", f"Under {WHERE[kind]}", "\n".join([*head, *rows])]
    return "\n\n".join(parts)


def combined(algorithms: Sequence[Offer]) -> str:
    """Write which parts fit which algorithm."""
    text: str = _beside("combinations").page(registry(), [offer.component.name for offer in algorithms])
    return text


def _beside(name: str) -> Any:
    """Import a module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def one_kind(kind: Kind, offers: Sequence[Offer]) -> str:
    """Write the page of the components of one kind."""
    head = f"Components that stand under {WHERE[kind]} All kinds: [Components](../components.md)."
    return "\n\n".join([f"# {kind.capitalize()}", head, *map(component, offers)])


def offered(kind: Kind) -> Iterator[Offer]:
    """Return the components of a kind that this repository offers."""
    ours = distributions()
    yield from (offer for offer in registry().offers(kind).values() if offer.distribution in ours)


@functools.cache
def registry() -> Registry:
    """Load the installed plugins, once."""
    return load_plugins()


@functools.cache
def distributions() -> set[str]:
    """Return the names of the distributions of this repository."""
    files = [ROOT / "core" / "pyproject.toml", *ROOT.glob("plugins/*/*/pyproject.toml")]
    return {tomllib.loads(file.read_text())["project"]["name"] for file in files}


def component(offer: Offer) -> str:
    """Write one component."""
    cls = offer.component.config
    lines = [f"## `{offer.component.name}`", f"{summary(cls)} From `{offer.distribution}`."]
    rows = describe(cls)
    return "\n\n".join([*lines, markdown(rows).rstrip() if rows else "It has no settings."])


def contracts() -> str:
    """Write the rules of every contract class, as the sentences that their names are."""
    modules = sorted(module.name for module in pkgutil.iter_modules(contract_modules.__path__))
    found = [importlib.import_module(f"{contract_modules.__name__}.{name}") for name in modules]
    classes = [
        cls
        for module in found
        for name, cls in vars(module).items()
        if name.endswith("Contract") and cls.__module__ == module.__name__
    ]
    return "\n\n".join([CONTRACTS, *map(contract, classes)])


def contract(cls: type) -> str:
    """Write one contract: its example, what can be overridden, and its rules."""
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    first, _, example = doc.partition("\n\n")
    lines = [f"## `{cls.__name__}`", " ".join(first.split()), f"From `{cls.__module__}`."]
    shown = [part for part in example.split("\n\n") if part.startswith(("    ", "class "))]
    if shown:
        lines.append("```python not run: an example\n" + textwrap.dedent("\n\n".join(shown)).strip() + "\n```")
    settings = field_docs(cls)
    if settings:
        lines.append("\n".join(f"- `{name}`: {text}" for name, text in settings.items()))
    rules = [name.removeprefix("test_").replace("_", " ") for name in dir(cls) if name.startswith("test_")]
    return "\n\n".join([*lines, "\n".join(f"1. {rule[0].upper()}{rule[1:]}." for rule in rules)])


def cli() -> str:
    """Write every command with its arguments and options."""
    context = click.Context(group, info_name="whet")
    parts = ["# Command line", inspect.cleandoc(group.help or "")]
    for name in group.list_commands(context):
        owners = [offer.owner for offer in group.offers.get(name, ())]
        command = group.get_command(context, name) if set(owners) <= distributions() else None
        if command and not command.hidden:
            parts += [_command(command), *(f"The command comes with `{owner}`." for owner in owners)]
    return "\n\n".join(parts)


def _command(command: click.Command, before: str = "whet") -> str:
    path = f"{before} {command.name}"
    inner = sorted(command.commands.items()) if isinstance(command, click.Group) else []
    below = [_command(one, path) for _, one in inner]
    if isinstance(command, click.Group) and not command.invoke_without_command:
        return "\n\n".join(below)
    words = [_word(p) for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join([path, *(["[OPTIONS]"] if len(words) < len(command.params) else []), *words])
    parts = [f"## `{path}`", f"```text\n{usage}\n```", inspect.cleandoc(command.help or "").replace("\b\n", "")]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        parts.append("\n".join(f"- `{' '.join(p.opts + p.secondary_opts)}`: {p.help or ''}" for p in options))
    return "\n\n".join(part for part in [*parts, *below] if part)


def _word(argument: click.Argument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    name = name if argument.nargs == 1 or name.endswith("...") else f"{name}..."
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _split_parameters(doc: str) -> tuple[str, list[tuple[str, str]]]:
    """Separate `:param NAME: meaning` lines from the text above them."""
    text, *rest = doc.split(":param ")
    pairs = (item.split(":", 1) for item in rest)
    return text.strip(), [(name.strip(), " ".join(meaning.split())) for name, meaning in pairs]


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for module in ("collections.abc.", "typing."):
        text = text.replace(module, "")
    return text


def differences(folder: Path) -> Iterator[str]:
    """Name the pages in the folder that are not what the code says."""
    for name, text in pages().items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            yield name


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are out of date")
    folder = ROOT / "docs" / "reference"
    if parser.parse_args(arguments).check:
        outdated = list(differences(folder))
        shown = [f"docs/reference/{name}".replace("docs/reference/../../", "") for name in outdated]
        print("\n".join(f"{name} is out of date" for name in shown) or "up to date")
        return len(outdated)
    for name, text in pages().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
