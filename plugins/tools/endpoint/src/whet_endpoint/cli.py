"""`whet serve`: serve a model by any generator, without a run."""

from pathlib import Path

import click

from whet.cli.command import Command, say, warn_of_broken


@click.command(cls=Command)
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("--generator", default="hf", show_default=True, help="The generator, by its name after `use:`.")
@click.option("--address", type=click.Path(dir_okay=False), help="A file for the address and the key, as JSON.")
def serve(model: str, overrides: tuple[str, ...], generator: str, address: str | None) -> None:
    """Serve MODEL, a folder or a name on the hub, for clients of OpenAI's and Anthropic's APIs.

    The address and its key are printed as environment variables. KEY.PATH=VALUE sets a key as in a config, for example
    `endpoint.port=8000` or `generator.dtype=bfloat16`. Ctrl-C and SIGTERM end it.
    """
    from whet.cli.progress import Progress
    from whet.plugins.registry import load_plugins
    from whet_endpoint.serve import serving

    registry = load_plugins()
    warn_of_broken(registry)
    file = Path(address) if address else None
    try:
        with serving(model, generator, overrides, file=file, registry=registry, progress=Progress()) as served:
            click.echo(f"OPENAI_BASE_URL={served.address.base_url}\nOPENAI_API_KEY={served.address.api_key}")
            say(f"serving {served.model} as {served.address.model!r} until Ctrl-C or SIGTERM")
            served.wait()
    except KeyboardInterrupt:
        say("ended")
