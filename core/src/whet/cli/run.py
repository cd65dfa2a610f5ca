"""`whet run`: run a config from the beginning, or from its last checkpoint, to the end."""

import click

from whet.cli.command import Command, config_arguments, warn_of_broken


@click.command(cls=Command)
@config_arguments
def run(config: str, overrides: tuple[str, ...]) -> int:
    """Run CONFIG, or continue it after its last checkpoint.

    Keys of the config are changed by KEY.PATH=VALUE, for example `algorithm.group_size=16`. Ctrl-C and SIGTERM end
    the run after the step under way and save it.
    """
    from whet.compose import run as run_config
    from whet.plugins import load_plugins

    warn_of_broken(load_plugins())
    outcome = run_config(config, overrides)
    if outcome.finished:
        click.echo(f"finished {outcome.steps} steps in {outcome.folder}", err=True)
        return 0
    click.echo(
        f"ended after step {outcome.steps}; `whet run` with the same config continues {outcome.folder}", err=True
    )
    return 128 + outcome.stopped_by if outcome.stopped_by else 1
