"""`whet doctor`: whether this machine, and a config on it, is ready for a run."""

import json
import sys
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from whet_doctor.checks import Check

WIDE = 120
"""Terminals with this many columns show what to change in a column; narrower ones show it below what was found."""


@click.command(cls=Command, short_help="Check this machine, and a config on it.")
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(config: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, and with CONFIG also whether its run can start here.

    Each finding is ok, a warning, or a failure with what to change. No check can hang, and nothing is left behind. Exit
    code 1: something failed.
    """
    import attrs

    from whet_doctor.examine import examine

    found = examine(config, overrides)
    failed = any(check.status == "fail" for check in found)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "checks": [attrs.asdict(check) for check in found]}, indent=2))
    else:
        _print(found)
    return int(failed)


def _print(found: "Sequence[Check]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)
    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found", "what to change")[: 4 if wide else 3]:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("", "check"))
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in found:
        status = Text(check.status, colours[check.status])
        if wide:
            table.add_row(status, check.name, check.found, check.change)
        else:
            table.add_row(status, check.name, check.found)
            if check.change:
                table.add_row("", "", Text(f"-> {check.change}", colours[check.status]))
    console.print(table)
    warnings, failures = (sum(check.status == status for check in found) for status in ("warn", "fail"))
    counts = [_counted(len(found), "check"), _counted(warnings, "warning"), _counted(failures, "failure")]
    console.print(f"\n{', '.join(counts)}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
