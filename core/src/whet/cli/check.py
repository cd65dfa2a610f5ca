"""`whet check`: every check that needs no resources."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command, config_arguments, warn_of_broken

if TYPE_CHECKING:
    from whet.plan.placement import Machine
    from whet.plan.prepare import Prepared


@click.command(cls=Command)
@config_arguments
@click.option(
    "--machine", metavar="WORDS|FILE", help="Plan for this machine or cluster instead, e.g. 8xH100-80GB; see below."
)
@click.option("--trace", is_flag=True, help="Predict memory by traces, also where formulas show ample room.")
@click.option("--json", "as_json", is_flag=True, help="Print problems and plan as JSON.")
def check(config: str, overrides: tuple[str, ...], machine: str | None, trace: bool, as_json: bool) -> int:
    """Check CONFIG and print the plan of its run.

    No role is started and no weights are read: this needs no GPU and takes about a second. A warning names what is
    missing on this machine, GPUs included, and must exist where the run starts. A run that does not fit into memory is
    refused, with changes that make it fit. Where memory is tight, a training step is traced, which takes some seconds.

    `--machine` plans for another machine: `8xH100` has eight of these GPUs, `2x8xA100-40GB` are two machines with eight
    each, `4x24GB,cores=32,memory=256GB` also states cores and memory. GPUs that are not well known need their memory
    after the name. A `.yaml` file lists machines that differ.
    """
    from whet.errors import ConfigError
    from whet.plan.prepare import prepare
    from whet.plugins.features import FORECAST, forecasting

    def planned(further: Sequence[str], target: "Machine | None") -> "Prepared":
        return prepare(config, (*overrides, *further), target=target or prepared.machine, registry=registry)

    try:
        given = None if machine is None else FORECAST.load().given_machine(machine)
        prepared = prepare(config, overrides, target=given)
    except ConfigError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "problems": error.problems, "warnings": [], "plan": None}, indent=2))
        return 1
    warn_of_broken(registry := prepared.loaded.registry)
    forecast = forecasts.check(prepared, planned, trace) if (forecasts := forecasting()) is not None else None
    refused = [*prepared.plan.refusals, *(forecast.problems if forecast else ())]
    if as_json:
        plan = {**prepared.plan.to_dict(), **({"peaks": forecast.peaks} if forecast else {})}
        found = {"ok": not refused, "problems": refused, "warnings": plan.pop("warnings")}
        click.echo(json.dumps({**found, "plan": {key: plan[key] for key in plan if key != "refusals"}}, indent=2))
        return int(bool(refused))
    click.echo(f"structure: ok\nproblems: {len(refused) or 'none'}")
    if warnings := prepared.plan.warnings:
        click.echo("\n".join(["warnings, for it cannot run here:", *(f"  {line}" for line in warnings)]))
    click.echo("plan:")
    lines = (*(f"  {line}" for line in prepared.plan.describe().splitlines()), *(forecast.lines if forecast else ()))
    click.echo("\n".join(lines))
    if refused:
        raise ConfigError(refused)
    return 0
