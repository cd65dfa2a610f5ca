"""`whet eval`: evaluate a model on the environments of a config."""

from contextlib import nullcontext
from pathlib import Path

import click

from whet.cli.command import Command, config_arguments, warn_of_broken


@click.command("eval", cls=Command)
@config_arguments
@click.option("--out", type=click.Path(file_okay=False), help="A new or empty folder for evaluation.json and records.")
@click.option("--model", type=click.Path(), help="A model folder to evaluate instead of the config's model.path.")
@click.option("--against", type=click.Path(exists=True), help="An evaluation.json, or its folder, to compare with.")
def evaluate(config: str, overrides: tuple[str, ...], model: str | None, out: str | None, against: str | None) -> None:
    """Evaluate a model on the environments under `evaluation` in CONFIG."""
    from whet.cli.progress import Progress
    from whet.plugins.registry import load_plugins
    from whet_jobs.jobs import evaluate as evaluate_config
    from whet_training.whole import whole

    evaluated = None
    try:
        with whole(Path(out)) if out else nullcontext() as folder:
            registry = load_plugins()
            warn_of_broken(registry)
            evaluated = evaluate_config(
                config, overrides, model=model, against=Path(against) if against else None, registry=registry,
                progress=Progress(),
            )  # fmt: skip
            if folder:
                evaluated.write(folder)
    finally:  # neither is lost where the other cannot be written
        if evaluated is not None:
            click.echo(str(evaluated))
