"""The `whet` command: its list of commands, and how it ends.

Exit codes: 0 done, 1 an error of the run or its config, 2 wrong usage, 130 ended by Ctrl-C, 143 by SIGTERM.
"""

import os
import signal
import sys
from types import FrameType

import click

import whet
from whet.cli.check import check
from whet.cli.config import config
from whet.cli.doctor import doctor
from whet.cli.evaluate import evaluate
from whet.cli.export import export
from whet.cli.new import new
from whet.cli.plugins import plugins
from whet.cli.report import report
from whet.cli.run import run
from whet.cli.schema import schema


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(whet.__version__, package_name="whet", prog_name="whet")
def group() -> None:
    """Sharpen a language model: supervised fine-tuning and reinforcement learning, from plugins and one YAML file."""


for _command in (run, check, config, doctor, evaluate, report, export, plugins, schema, new):
    group.add_command(_command)


def main() -> None:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    _fill_standard_streams()
    try:
        code = group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:  # what click makes of Ctrl-C
        code = 128 + signal.SIGINT
    except Terminated:
        code = 128 + signal.SIGTERM
    sys.exit(code)


def _fill_standard_streams() -> None:
    """Open what nobody opened of standard input, output and error: another file in their place would be written to."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.dup(descriptor)
    os.close(descriptor)


class Terminated(BaseException):
    """SIGTERM, as Ctrl-C is KeyboardInterrupt: nothing that handles errors or SystemExit may swallow it."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
