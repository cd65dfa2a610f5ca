"""The part of a tracker's logger that no tracker changes: which events become what, and what it catches up on.

    run folder   1 2 3 4 5 6 | killed; its last checkpoint is of step 6
    tracker      1 2 3 4     |          5 6 are sent from the files of the run folder, then 7 8 ... as they happen

A tracker cannot erase. A run that goes back to a checkpoint sends the repeated steps again: the last row of a step
counts. `attempt` in each row tells which run attempt took the step.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from whet.data.files import read_metrics, read_rows, step_of
from whet.errors import WhetError
from whet.interfaces.logger import Event, RunInfo
from whet.run.run_folder import RunFolder
from whet_tracking import tables
from whet_tracking.config import TrackingConfig

logger = logging.getLogger(__name__)

STEP, ATTEMPT = "step", "attempt"
"""Two more numbers of each row: the run's step, and the run attempt that took it."""
MOST_ROWS = 1000
"""Rows of a file that become a table."""


class TrackingLogger:
    """Sends metrics, histograms and tables of a run to a tracker. A subclass opens the tracker, then calls `catch_up`.

    `send`, `table`, `histogram` and `finish` are the subclass's.
    """

    def __init__(self, config: TrackingConfig, run: RunInfo) -> None:
        self.config, self.run = config, run
        self._attempt = sum(row.get("event") == "opened" for row in rows_of(run.folder / "journal.jsonl"))
        self._step, self.closed = 0, False

    def send(self, step: int, values: Mapping[str, Any], whole: bool) -> None:
        """Send values of a step. `whole`: these are its metrics, and the row of the step is complete."""
        raise NotImplementedError

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """Return a table as the tracker takes it."""
        raise NotImplementedError

    def histogram(self, counts: list[int], bounds: list[float]) -> Any:
        """Return a histogram as the tracker takes it."""
        raise NotImplementedError

    def finish(self, failed: bool) -> None:
        """Close the tracker's run."""
        raise NotImplementedError

    def catch_up(self, last: int) -> None:
        """Send the steps that the run folder has, up to the checkpoint of a resume, and that follow `last`, the last
        step that the tracker has; -1: it has none.
        """
        resumed_from = self.run.resumed_from
        if not resumed_from:
            return
        histograms: dict[int, list[dict[str, Any]]] = {}
        for row in rows_of(self.run.folder / "histograms.jsonl"):
            histograms.setdefault(row.get("step", -1), []).append(row)
        for step, metrics in read_metrics(self.run.folder / "metrics.jsonl"):
            if not last <= step <= resumed_from:
                continue
            for event in recorded(self.run.folder, step, histograms.get(step, [])):
                if step > last or event.kind == "rollouts":  # which are sent after the metrics, and may be missing
                    self.event(event)
            if step > last:
                self.log(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._step = step
        self.send(step, {**metrics, STEP: step, ATTEMPT: self._attempt}, True)

    def event(self, event: Event) -> None:
        """Send histograms and tables; count run attempts."""
        step, config = event.step or 0, self.config
        if event.kind == "opened":
            self._attempt += 1
        elif event.kind == "histograms":
            bins = {row["name"]: tables.bins(row["edges"], row["counts"]) for row in event.rows}
            self.send(step, {name: self.histogram(*found) for name, found in bins.items()}, False)
        elif event.kind == "rollouts" and config.rollouts_every and (step == 1 or step % config.rollouts_every == 0):
            self._send_table(step, "rollouts", tables.episodes(event.rows, step, config.rollouts))
        elif event.kind == "evaluation":
            table = tables.episodes(event.rows, step, config.episodes)
            self._send_table(step, f"evaluation/{event.name}/episodes", table)
        elif event.kind == "table":
            self._send_table(step, f"table/{event.name}", tables.any_table(event.rows, step))

    def status(self, text: str) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Do nothing: the steps after `step` are sent again, and the last row of a step counts."""

    def close(self, failed: bool) -> None:
        """Send the failures of the whole run as a table, and close the tracker's run."""
        if not self.closed:
            self.closed = True
            self._send_table(self._step, "failures", tables.failures(rows_of(self.run.folder / "journal.jsonl")))
            self.finish(failed)

    def _send_table(self, step: int, name: str, table: tables.Table) -> None:
        if table[1]:
            self.send(step, {name: self.table(*table)}, False)


def name_of(folder: Path, file: str, key: str, new: str) -> tuple[str, bool]:
    """Return the name by which a tracker knows the run, `new` if it has none, and whether it had one.

    A file of the run folder keeps the name under `key`, with the folder's path: a copy of the folder is another run.
    """
    files, here = RunFolder(folder), folder.resolve()
    found = files.read_json(file)
    kept = found if isinstance(found, dict) else {}
    name, first = kept.get(key), Path(kept.get("folder", here))
    if name is not None and _is_copy(here, first, file, kept):
        logger.warning(f"{folder} is a copy of {first}, so it has a run of its own at the tracker, from step 1")
        name = None
    if kept != (wanted := {key: str(name or new), "folder": str(here)}):
        files.write_json(file, wanted)
    return wanted[key], name is not None


def _is_copy(here: Path, first: Path, file: str, kept: Mapping[str, Any]) -> bool:
    """Return whether the folder where the run was before is still there, with the same name in its file."""
    with suppress(WhetError, OSError):
        return first != here and not first.samefile(here) and RunFolder(first).read_json(file) == kept
    return False


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file of the run folder; none if there is no such file."""
    return read_rows(file) if file.exists() else iter(())


def recorded(folder: Path, step: int, histograms: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """Return the events of a step as the run folder keeps them."""
    if histograms:
        yield Event("histograms", step, rows=histograms)
    for kind, name in (("evaluation", "evaluations"), ("table", "tables"), ("rollouts", "rollouts")):
        for file in sorted((folder / name).glob(f"step-{step:06d}*.jsonl")):
            if step_of(file.name) == step:
                rows = list(islice(read_rows(file), MOST_ROWS))
                yield Event(kind, step, file.stem.removeprefix(f"step-{step:06d}").removeprefix("-"), rows=rows)
