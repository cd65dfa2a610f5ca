"""Two ways to show a run: a live bar under rows in a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from whet.interfaces.logger import RunInfo
from whet_console.display import harmless, number

ROWS_BETWEEN_HEADERS = 20


def _width(name: str) -> int:
    """Width of a column, with the space before it."""
    return max(len(name), 9) + 2


class View(Protocol):
    """What the logger needs of either way."""

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show chosen metrics of a step."""
        ...

    def line(self, text: str) -> None:
        """Show a line."""
        ...

    def advance(self, step: int) -> None:
        """Show how far the run is."""
        ...

    def status(self, text: str) -> None:
        """Show what the run waits for."""
        ...

    def close(self) -> None:
        """End the live display."""
        ...


class Terminal:
    """Aligned rows that scroll away over a bar with the time left and the status."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        self._console = console
        self._columns: list[str] = []
        self._rows = 0
        status = TextColumn(
            "{task.fields[status]}", markup=False, style="dim", table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        # Two refreshes a second: the display must not compete with a run for the cores.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(), status,
            console=console, transient=True, refresh_per_second=2, speed_estimate_period=3600.0,
        )  # fmt: skip
        name = harmless(run.name, 40, console.encoding)
        self._task = self._progress.add_task(name, total=run.steps or None, completed=run.resumed_from, status="")
        self._progress.start()

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print an aligned row, and the header above it where the columns change."""
        columns = self._fitting(list(metrics))
        if columns != self._columns or self._rows % ROWS_BETWEEN_HEADERS == 0:
            self._columns, self._rows = columns, 0
            more = "  ..." if len(columns) < len(metrics) else ""
            self._print("  step" + "".join(name.rjust(_width(name)) for name in columns) + more, "bold")
        self._rows += 1
        self._print(f"{step:6d}" + "".join(number(metrics[name]).rjust(_width(name)) for name in columns))

    def _fitting(self, columns: list[str]) -> list[str]:
        """Leave out the last columns where the terminal is too narrow: a number that is cut is worse than none."""
        room, used = self._console.width - 6, 0
        for i, name in enumerate(columns):
            used += _width(name)
            if used + (5 if i + 1 < len(columns) else 0) > room:
                return columns[: max(i, 1)]
        return columns

    def line(self, text: str) -> None:
        """Print a line above the bar, on several where the terminal is narrow."""
        self._console.print(Text(text, "cyan"))

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, status="")

    def status(self, text: str) -> None:
        """Show the text behind the bar until the step ends."""
        self._progress.update(self._task, status=f"waiting on: {text}" if text else "")

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), no_wrap=True, overflow="ellipsis", crop=True)


class Lines:
    """Plain lines without any control codes, for files, pipes and services."""

    def __init__(self, console: Console, run: RunInfo, quiet_seconds: float) -> None:
        self._console, self._run, self._quiet_seconds = console, run, quiet_seconds
        self._spoke = time.monotonic()

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line that names every number."""
        of = f"/{self._run.steps}" if self._run.steps else ""
        self.line(f"step {step}{of}  " + "  ".join(f"{name} {number(value)}" for name, value in metrics.items()))

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()
        self._spoke = time.monotonic()

    def advance(self, step: int) -> None:
        """Nothing to move."""

    def status(self, text: str) -> None:
        """Print the status where nothing was printed for long."""
        if text and time.monotonic() - self._spoke >= self._quiet_seconds:
            self.line(f"waiting on: {text}")

    def close(self) -> None:
        """Nothing to end."""
