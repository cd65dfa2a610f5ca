"""`whet import`: write a checkpoint of Megatron as a model folder."""

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
