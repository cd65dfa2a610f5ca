"""`whet import` and `whet to-megatron`: checkpoints of Megatron as model folders, and back."""

import click

from whet.cli.command import Command


@click.command("import", cls=Command, short_help="Write a checkpoint of Megatron as a model folder.")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--model", required=True, type=click.Path(), help="A model folder with config.json and tokenizer.")
def import_(checkpoint: str, out: str, model: str) -> None:
    """Write CHECKPOINT, which Megatron-LM or Megatron Core has saved in the format torch_dist, to the folder OUT.

    `transformers` and inference engines load OUT. The weights keep their dtype and their bits. One weight is in memory
    at a time, and no GPU is needed. Nothing that the checkpoint holds is run: an index that names code is refused.
    """
    from whet_megatron.imported import import_model

    import_model(checkpoint, out, model)
    click.echo(f"wrote {out}: the weights of {checkpoint}")


@click.command("to-megatron", cls=Command, short_help="Write a model folder as a checkpoint of Megatron.")
@click.argument("model", type=click.Path())
@click.argument("out", type=click.Path())
def to_megatron(model: str, out: str) -> None:
    """Write the weights of the model folder MODEL to the folder OUT, with which Megatron-LM starts.

    OUT has the format torch_dist, which loads with any parallelism. The weights keep their dtype and their bits. One
    weight is in memory at a time, and no GPU is needed. MODEL may be the export of a run.
    """
    from whet_megatron.release import write_release

    further = write_release(model, out)
    click.echo(f"wrote {out}: the weights of {model}")
    click.echo(f"Megatron-LM needs the arguments --use-checkpoint-args {further}")
