"""`whet check`: go as far as anyone can without resources."""

import json

import click

from whet.cli.command import Command, config_arguments, warn_of_broken


@click.command(cls=Command)
@config_arguments
@click.option("--json", "as_json", is_flag=True, help="Print problems and plan as JSON.")
def check(config: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check CONFIG and print the plan of its run.

    Nothing is started and no weights are read: this needs no GPU and takes about a second.
    """
    from whet.errors import ConfigError
    from whet.prepare import prepare

    try:
        prepared = prepare(config, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": error.problems, "plan": None}, indent=2))
        return 1
    warn_of_broken(prepared.loaded.registry)
    if as_json:
        click.echo(json.dumps({"ok": True, "problems": [], "plan": prepared.plan.to_dict()}, indent=2))
    else:
        click.echo("structure: ok\nproblems: none\nplan:")
        click.echo("\n".join(f"  {line}" for line in prepared.plan.describe().splitlines()))
    return 0
