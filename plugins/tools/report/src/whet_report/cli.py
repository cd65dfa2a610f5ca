"""`whet report`: a run as one HTML page."""

from pathlib import Path

import click

from whet.cli.command import Command


@click.command(cls=Command, short_help="Write one HTML page about a run.")
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The page; by default RUN/report.html.")
def report(run_folder: Path, out: Path | None) -> None:
    """Write one HTML page about the run in the folder RUN. The run may still be running.

    The page needs only a browser: no server, no network. It shows metrics, where the time went, rollouts token by
    token, where sampler and trainer disagree, the config and the errors.
    """
    from whet_report.page import write_page
    from whet_report.run import read_run

    file = out or run_folder / "report.html"
    size = write_page(file, read_run(run_folder))
    click.echo(f"wrote {file} ({size / 1e6:.1f} MB)")
