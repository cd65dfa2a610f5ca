"""`whet memory RUN`: the predicted and the measured peak of each phase of a run, side by side."""

import click

from whet.cli.command import Command


@click.command(cls=Command)
@click.argument("run", type=click.Path(exists=True, file_okay=False))
def memory(run: str) -> None:
    """Print the peaks of memory of RUN, a run folder: predicted, and measured by the workers.

    Predicted: `plan.json`. Measured: the largest `memory/ROLE.PHASE` of all steps in `metrics.jsonl`.
    """
    from whet.run.run_folder import RunFolder
    from whet_memory.compared import compared, lines

    click.echo("\n".join(lines(compared(RunFolder(run)))))
