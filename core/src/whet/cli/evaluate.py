"""`whet eval`: evaluate a model on the environments of a config."""

from pathlib import Path

import click

from whet.cli.command import Command, config_arguments, warn_of_broken


@click.command("eval", cls=Command)
@config_arguments
@click.option("--out", type=click.Path(file_okay=False), help="A folder for metrics.json and a record per episode.")
@click.option("--model", type=click.Path(), help="A model folder to evaluate instead of the config's model.path.")
def evaluate(config: str, overrides: tuple[str, ...], model: str | None, out: str | None) -> None:
    """Evaluate a model on what CONFIG has under `evaluation`."""
    from whet.cli.progress import Progress
    from whet.jobs import evaluate as evaluate_config
    from whet.plugins import load_plugins

    registry = load_plugins()
    warn_of_broken(registry)
    evaluated = evaluate_config(config, overrides, model=model, registry=registry, progress=Progress())
    if out:
        evaluated.write(Path(out))
    click.echo(str(evaluated))
