"""The commands of `whet`: core's own, and commands that distributions name in the entry-point group `whet.commands`.

    [project.entry-points."whet.commands"]
    shine = "whet_shine.cli:shine"     # the name of a command, and a click command

A command that takes the folder of a run stands in the group `whet.after_run` too: a finished run recommends it, with
the summary of the distribution.

A command is imported when it is used. `whet --help` imports none: it reads the docstring of the command's function from
the source. Without a docstring, it shows the summary of the distribution. A click command made with
`cls=whet.cli.command.Command` reports errors as core's own do.
"""

import ast
import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from whet.cli.command import Utf8
from whet.errors import in_words
from whet.installed import entry_points

GROUP, AFTER_RUN = "whet.commands", "whet.after_run"


class Offer(NamedTuple):
    """A command of a distribution."""

    entry: EntryPoint
    distribution: Distribution

    @property
    def owner(self) -> str:
        """Name of the distribution."""
        return self.distribution.name

    @property
    def about(self) -> str:
        """Return the line on the distribution."""
        return self.distribution.metadata["Summary"] or f"Offered by {self.owner}."

    @property
    def short_help(self) -> str:
        """Return the first sentence of the docstring of the command, or else the line on the distribution."""
        module, _, name = self.entry.value.partition(":")
        top, *rest = module.split(".")
        with suppress(Exception):  # without source, or without such a function in it
            spec = find_spec(top)
            place = Path(spec.origin if spec and spec.origin else "")
            place = place.parent.joinpath(*rest).with_suffix(".py") if rest else place
            for node in ast.parse(place.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name == name and (text := ast.get_docstring(node)):
                    return click.Command(name, help=text).get_short_help_str(len(text))
        return self.about


class Commands(Utf8, click.Group):
    """The list of commands: core's own, which were added, and the commands of installed distributions."""

    @functools.cached_property
    def offers(self) -> Mapping[str, Sequence[Offer]]:
        """Return the commands of installed distributions by name."""
        found: dict[str, list[Offer]] = {}
        for offer in sorted(installed(), key=lambda offer: offer.owner):
            found.setdefault(offer.entry.name, []).append(offer)
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*self.commands, *self.offers})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command, imported. Raises `ClickException` for one that is offered twice or cannot be used."""
        if refusal := self.contested(name):
            raise click.ClickException(refusal)
        return load(self.offers[name][0]) if name in self.offers else self.commands.get(name)

    def contested(self, name: str) -> str | None:
        """Return which distributions offer the same command, and what to uninstall. None: at most one offers it."""
        own, others = name in self.commands, [offer.owner for offer in self.offers.get(name, ())]
        if len(others) + own < 2:
            return None
        remedy = f"uninstall {' and '.join(others)}" if own else "uninstall all but one of them"
        return f"the command {name!r} is offered by {' and '.join(['whet'] * own + others)}; {remedy}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line on each command; no command of a distribution is imported for it."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        own = {name: command.get_short_help_str(limit) for name, command in self.commands.items()}
        lines = {name: self.contested(name) or own.get(name) or self.offers[name][0].short_help for name in names}
        with formatter.section("Commands"):
            formatter.write_dl(list(lines.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name. Raises `UsageError` that leads to the name that was meant."""
        name = args[0]
        if name in self.list_commands(ctx) or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise click.UsageError(_no_command(name, self.list_commands(ctx)), ctx)


def installed(group: str = GROUP) -> Iterator[Offer]:
    """Return the commands of installed distributions. Of two that have one name the first on the path is imported."""
    return (Offer(entry, entry.dist) for entry in entry_points(group) if entry.dist is not None)


def after_run(folder: Path) -> list[str]:
    """Return the commands of installed distributions for a finished run, each with what it does."""
    found, place = sorted((one.entry.name, one.about) for one in installed(AFTER_RUN)), shlex.quote(str(folder))
    return [f"`whet {name} {place}`: {about[:1].lower()}{about[1:].rstrip('.')}" for name, about in found]


def load(offer: Offer) -> click.Command:
    """Import a command. Raises `ClickException` with the distribution and what is wrong with it."""
    from whet.plugins.registry import other_core

    try:
        reason = other_core(offer.distribution.requires or [])
        command = None if reason else offer.entry.load()
    except (Exception, SystemExit) as error:
        reason, command = in_words(error), None
    if isinstance(command, click.Command):
        return command
    reason = reason or f"{offer.entry.value} is {command!r:.80}, wanted a click command"
    raise click.ClickException(f"the command {offer.entry.name!r} of {offer.owner} cannot be used: {reason}")


def _no_command(name: str, known: Sequence[str]) -> str:
    """Return that a command is not there, and which was meant, or which distribution offers it."""
    from whet.config.messages import choice_words, nearest
    from whet.plugins.catalog import catalog, offered_words

    elsewhere = catalog().commands
    if name in elsewhere:
        return f"there is no command {name!r} here; {offered_words(elsewhere[name])}"
    meant = None if nearest(name, known) else nearest(name, elsewhere)
    choice = f" (did you mean {meant!r}? {offered_words(elsewhere[meant])})" if meant else choice_words(name, known)
    return f"there is no command {name!r:.80}{choice}"
