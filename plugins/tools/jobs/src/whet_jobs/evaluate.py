"""`whet eval`: evaluate a model on the environments of a config."""

from pathlib import Path

import click

from whet.cli.command import Command, config_arguments, warn_of_broken
from whet.errors import WhetError


@click.command("eval", cls=Command)
@config_arguments
@click.option("--out", type=click.Path(file_okay=False), help="A new or empty folder for evaluation.json and records.")
@click.option("--model", type=click.Path(), help="A model folder to evaluate instead of the config's model.path.")
@click.option("--against", type=click.Path(exists=True), help="An evaluation.json, or its folder, to compare with.")
def evaluate(config: str, overrides: tuple[str, ...], model: str | None, out: str | None, against: str | None) -> None:
    """Evaluate a model on the environments under `evaluation` in CONFIG."""
    from whet.cli.progress import Progress
    from whet.plugins.registry import load_plugins
    from whet_jobs.jobs import check_writable, used
    from whet_jobs.jobs import evaluate as evaluate_config

    if out:
        if words := used(Path(out)):
            raise WhetError(f"{words}; wanted a new or an empty one for the evaluation: give --out another folder")
        check_writable(Path(out))
    registry = load_plugins()
    warn_of_broken(registry)
    other = Path(against) if against else None
    evaluated = evaluate_config(config, overrides, model=model, against=other, registry=registry, progress=Progress())
    try:
        click.echo(str(evaluated))
    finally:  # neither is lost where the other cannot be written
        if out:
            evaluated.write(Path(out))
