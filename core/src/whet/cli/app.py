"""The `whet` command: its list of commands."""

import os
import sys
from contextlib import suppress

import click

from whet.cli.check import check
from whet.cli.commands import Commands
from whet.cli.run import run


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="whet", prog_name="whet")
def group() -> None:
    """Sharpen a language model: supervised fine-tuning and reinforcement learning, from plugins and one YAML file."""


for _command in (run, check):
    group.add_command(_command)


def run_command() -> int:
    """Run the command of the command line, and return the exit code. Raises `KeyboardInterrupt` after Ctrl-C."""
    _fill_standard_streams()
    try:
        code: int = group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OSError as error:  # of `--help`, of `--version`, or of a command that is no `whet.cli.command.Command`
        with suppress(OSError):
            print(f"Error: {error}", file=sys.stderr)
        return 1
    except click.Abort:  # click turns Ctrl-C into this
        raise KeyboardInterrupt from None
    return code


def _fill_standard_streams() -> None:
    """Open standard input, output and error if they are closed. Otherwise the next open file would take their place.

    Python leaves closed streams out, and libraries rely on them.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as we live
