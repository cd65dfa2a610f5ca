"""`whet export`: write a checkpoint as a model folder."""

from typing import Any, Literal

import click

from whet.cli.command import Command


class _Step(click.IntRange):
    name = "step"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "best" else super().convert(value, param, ctx)


@click.command(cls=Command, short_help="Write a checkpoint as a model folder.")
@click.argument("run_folder", type=click.Path())
@click.argument("out", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("--step", type=_Step(), help="The checkpoint's step, or `best` by run.keep_best; by default the last.")
def export(run_folder: str, out: str, overrides: tuple[str, ...], step: "int | Literal['best'] | None") -> None:
    """Write a checkpoint of RUN_FOLDER to the folder OUT, which `transformers` loads.

    KEY.PATH=VALUE changes the run's config for the export alone, e.g. how the backend exports.
    """
    from whet_jobs.jobs import export as export_run

    written = export_run(run_folder, out, step=step, overrides=overrides)
    click.echo(f"wrote {out}: the model after step {written} of {run_folder}")
