"""The logger: one run of Trackio for one run of whet, however often the run is killed and resumed."""

import secrets
from collections.abc import Mapping
from contextlib import redirect_stdout
from sys import stderr
from typing import Any

import trackio

from whet.interfaces.logger import RunInfo
from whet_tracking.logger import STEP, TrackingLogger, name_of
from whet_trackio.config import TrackioConfig

FILE = "trackio.json"
"""File of the run folder with the name of the run at Trackio, by which Trackio finds it again."""


class TrackioLogger(TrackingLogger):
    """Sends a run to Trackio, as far as Trackio does not have it yet."""

    def __init__(self, config: TrackioConfig, run: RunInfo) -> None:
        super().__init__(config, run)
        new = f"{config.name or run.name}-{secrets.token_hex(3)}"
        name, known = name_of(run.folder, FILE, "name", new)
        with redirect_stdout(stderr):  # standard output belongs to the run
            self._run = trackio.init(
                project=config.project, name=name, group=config.group or None, space_id=config.space or None,
                config=dict(run.config), resume="allow" if known else "never", embed=False,
            )  # fmt: skip
        self.catch_up(self._run._next_step - 1 if known else -1)

    def send(self, step: int, values: Mapping[str, Any], whole: bool) -> None:
        """Send values as an entry of their step; Trackio shows all entries of a step together."""
        self._run.log({name: value for name, value in values.items() if name != STEP}, step=step)

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """Return a table of Trackio."""
        return trackio.Table(columns=columns, data=rows)

    def histogram(self, counts: list[int], bounds: list[float]) -> Any:
        """Return a histogram of Trackio."""
        return trackio.Histogram(np_histogram=(counts, bounds))

    def finish(self, failed: bool) -> None:
        """Send what still waits, and end the run."""
        with redirect_stdout(stderr):
            self._run.finish()
