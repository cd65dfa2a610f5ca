"""`whet check`: go as far as anyone can without resources."""

import json

import click

from whet.cli.command import Command, config_arguments, warn_of_broken


@click.command(cls=Command)
@config_arguments
@click.option("--json", "as_json", is_flag=True, help="Print problems and plan as JSON.")
def check(config: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check CONFIG and print the plan of its run.

    Nothing is started and no weights are read: this needs no GPU and takes about a second. A warning tells what is not
    installed here and would have to be wherever it runs.
    """
    from whet.errors import ConfigError
    from whet.prepare import prepare

    try:
        prepared = prepare(config, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": error.problems, "warnings": [], "plan": None}, indent=2))
        return 1
    warn_of_broken(prepared.loaded.registry)
    if as_json:
        plan = prepared.plan.to_dict()
        click.echo(json.dumps({"ok": True, "problems": [], "warnings": plan.pop("warnings"), "plan": plan}, indent=2))
    else:
        click.echo("structure: ok\nproblems: none")
        if warnings := prepared.plan.warnings:
            click.echo("\n".join(["warnings, for it cannot run here:", *(f"  {line}" for line in warnings)]))
        click.echo("plan:")
        click.echo("\n".join(f"  {line}" for line in prepared.plan.describe().splitlines()))
    return 0
