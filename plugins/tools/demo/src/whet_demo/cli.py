"""`whet demo`: trains a small model that starts from nothing, in a few minutes on a laptop."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command, say, warn_of_broken
from whet.cli.commands import installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from whet.plugins.registry import Registry
    from whet_demo.demos import Demo
    from whet_demo.stages import Stage

SHOWN = 6
"""Number of values of a learning curve in the table."""


class _Demo(Command):
    """Lists the demos at the end of its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from whet.plugins.registry import load_plugins
        from whet_demo.demos import demos

        formatter.write_paragraph()
        formatter.write_text(f"Demos: {', '.join(demos(load_plugins()))}.")


@click.command(cls=_Demo, short_help="Make a small model and train it.")
@click.argument("name", required=False)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for everything that is written: runs/quickstart-0.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    help="Steps of the last run; the others are shortened in proportion. 0: no run.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of model, data and runs: 0. It cannot change once they are made.",
)
def demo(name: str | None, folder: Path | None, steps: int | None, seed: int) -> int:
    """Make a small model and its data, and train it by supervised fine-tuning and by reinforcement learning.

    NAME is one of the demos that plugins ship; without NAME, the first of them. Each takes a few minutes on two CPU
    cores, and needs neither a GPU nor a download. The same command continues where it was ended.
    """
    from whet.plugins.registry import load_plugins
    from whet_demo.demos import demo as find
    from whet_demo.demos import demos
    from whet_demo.stages import refuse_shorter, stages
    from whet_demo.start import make_start

    registry, began = load_plugins(), time.monotonic()
    warn_of_broken(registry)
    chosen = find(registry, name or next(iter(demos(registry)), "arithmetic"))
    folder = folder or Path("runs") / f"{chosen.recipes[-1].rpartition('-')[0]}-{seed}"
    runs = stages(chosen, folder, registry, steps or None, seed)
    refuse_shorter(runs)
    say(f"{chosen.name}: {chosen.about}. {_duration(chosen, steps)}; everything goes into {folder}/")
    say(f"model and data: {folder / 'start'}")
    make_start(chosen, folder, seed)
    for number, stage in enumerate(runs if steps != 0 else (), 1):
        say(f"\n{number} of {len(runs)}: {_command(stage)}   ({stage.steps} steps)\n")
        if code := _run(stage, registry):
            say("ended; the same `whet demo` goes on from here")
            return code
    if steps == 0:
        click.echo("\n".join(["made; to run it:", *(f"  {_command(stage)}" for stage in runs)]))
        return 0
    _show(runs, time.monotonic() - began)
    return 0


def _duration(chosen: "Demo", steps: int | None) -> str:
    if steps == 0:
        return "Only the model, its data and the recipes are made"
    whole = f"about {chosen.minutes:g} minutes on two CPU cores"
    short = f"So few steps show that everything works, not that the model learns; all of them take {whole}"
    return f"It takes {whole}" if steps is None else short


def _command(stage: "Stage") -> str:
    return shlex.join(["whet", "run", str(stage.recipe), *stage.overrides])


def _run(stage: "Stage", registry: "Registry") -> int:
    """Run one recipe. Return 0 when it is finished, else the exit code."""
    from whet.run.compose import run

    outcome = run(stage.recipe, stage.overrides, registry=registry)
    if outcome.before:
        say(f"finished before, all {outcome.steps} steps of it")
    return 0 if outcome.finished else 128 + (outcome.stopped_by or 0) if outcome.stopped_by else 1


def _show(runs: "Sequence[Stage]", seconds: float) -> None:
    """Print what was learned, where the results are, and what to do next."""
    from rich.console import Console
    from rich.table import Table

    from whet_demo.stages import course

    table = Table(box=None, pad_edge=False)
    for heading in ("run", "steps", "measured on held-out data", "from first to last"):
        table.add_column(heading, overflow="fold")
    for stage in runs:
        found = course(stage.folder)
        values = [value for _, value in found.values] if found else []
        table.add_row(stage.folder.name, str(stage.steps), found.metric if found else "", _course(values))
    console = Console(markup=False, highlight=False, emoji=False)
    console.print("\n", table, sep="")
    plots = [str(stage.folder / "plot.png") for stage in runs if (stage.folder / "plot.png").is_file()]
    last = runs[-1]
    click.echo(f"\nit took {seconds / 60:.1f} minutes")
    click.echo(f"curves: {', '.join(plots) or 'none were drawn, for the recipes name no logger that does'}")
    click.echo(f"model:  {last.folder / 'model'}, a folder that transformers loads")
    click.echo("\nwhat to do next:")
    for command, what in _next(last):
        click.echo(f"  {command}\n      {what}")


def _next(last: "Stage") -> "Iterator[tuple[str, str]]":
    """Yield commands that lead on from a finished demo, and what each is for."""
    from whet.plugins.catalog import catalog, install_words

    again = last.folder.with_name(f"{last.folder.name}-again")
    commands = {offer.entry.name for offer in installed()}
    if "report" in commands:
        yield f"whet report {last.folder}", "one page of curves, phases and responses, token by token"
    yield f"whet config explain {last.recipe}", "every key of the recipe, its value and its meaning"
    yield f"whet run {last.recipe} run.folder={again} run.seed=1", "any key can be changed on the command line"
    yield "whet recipe", "recipes to start from"
    new = "whet new environment NAME"
    if "new" not in commands:
        new = f"{install_words([catalog().commands['new']])} && {new}"
    yield new, "a package with tasks and rewards of your own"


def _course(values: "Sequence[float]") -> str:
    """Return some of the values as text, the first and the last included."""
    count = min(len(values), SHOWN)
    places = [round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)]
    return " ".join(f"{values[place]:.3f}" for place in places)
