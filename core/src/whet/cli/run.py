"""`whet run`: run a config from the beginning, or from its last checkpoint, to the end."""

import shlex
import signal
from typing import TYPE_CHECKING

import click

from whet.cli.command import Command, config_arguments, say, warn_of_broken
from whet.cli.commands import after_run

if TYPE_CHECKING:
    from whet.run.compose import Outcome


@click.command(cls=Command)
@config_arguments
def run(config: str, overrides: tuple[str, ...]) -> int:
    """Run CONFIG, or continue it after its last checkpoint.

    KEY.PATH=VALUE changes a key of the config, for example `algorithm.group_size=16`. Ctrl-C and SIGTERM end the run
    after the current step and save it. A second Ctrl-C ends it at once, without saving.
    """
    from whet.plugins.registry import load_plugins
    from whet.run.compose import run as run_config
    from whet.run.startup_time import process_began

    began, registry = process_began(), load_plugins()
    warn_of_broken(registry)
    try:
        outcome = run_config(config, overrides, registry=registry, began=began)
    except KeyboardInterrupt:  # during the start-up, or a second Ctrl-C
        say("ended at once; `whet run` with the same config continues after its last checkpoint, if it has one")
        return 128 + signal.SIGINT
    if outcome.before:
        say(nothing_left(config, overrides, outcome))
        return 0
    if outcome.finished:
        shown = "".join(f"; {words}" for words in after_run(outcome.folder))
        say(f"finished {outcome.steps} steps in {outcome.folder}{shown}")
        return 0
    ended = "ended" if outcome.stopped_by else "the algorithm returned"
    of = "" if outcome.stopped_by else f" of {outcome.total}"
    say(f"{ended} after step {outcome.steps}{of}; `whet run` with the same config continues {outcome.folder}")
    return 128 + outcome.stopped_by if outcome.stopped_by else 1


def nothing_left(config: str, overrides: tuple[str, ...], outcome: "Outcome") -> str:
    """Return a message that the run is finished, where its results are, and how to continue."""
    folder, steps = outcome.folder, outcome.steps
    others = [override for override in overrides if not override.startswith(("run.steps=", "run.epochs="))]
    further = f"run.epochs={2 * outcome.epochs:g}" if outcome.epochs else f"run.steps={2 * steps}"
    longer = shlex.join(["whet", "run", config, *others, further])
    results = [f"the model is in {folder / 'model'}"] if (folder / "model").is_dir() else []
    results += after_run(folder)
    return (
        f"this run is finished, all {steps} steps of it; nothing was started\n"
        f"results: {', and '.join(results) or folder}\n"
        f"to go on: {longer}\n"
        "to start afresh: another run.folder"
    )
