"""Two views of a run: rows above a progress bar in a terminal, plain lines anywhere else."""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from whet.interfaces.logger import RunInfo
from whet_console.display import harmless, number
from whet_console.pace import clock

ROWS_BETWEEN_HEADERS = 20
STEP, MORE = "  step", "  ..."
NARROWEST = 9
"""Least characters of a column; most numbers fit."""
ROOMY = 100
"""Width of a terminal from which the bar shows everything."""
LONGEST_NAME = 400


def heading(names: Sequence[str], room: int) -> tuple[list[list[str]], list[int]]:
    """Return the lines of a header, one text for each column, and the width of each column.

    If the names do not fit on one line, each is broken at its last slash. If that is not enough, the last columns are
    left out, because a name or a number that is cut would mislead.
    """
    widths: list[int] = []
    for lines in ([list(names)], [[_above(name) for name in names], [_below(name) for name in names]]):
        widths = [max(NARROWEST, *map(len, texts)) + 2 for texts in zip(*lines, strict=True)]
        if sum(widths) <= room:
            return lines, widths
    fitting = 0
    while fitting < len(names) and sum(widths[: fitting + 1]) + len(MORE) <= room:
        fitting += 1
    return [line[:fitting] for line in lines], widths[:fitting]


def _above(name: str) -> str:
    return name[: name.rindex("/") + 1] if "/" in name.strip("/") and len(name) > NARROWEST else ""


def _below(name: str) -> str:
    return name.removeprefix(_above(name))


class View(Protocol):
    """The methods of a view that the logger calls."""

    @property
    def width(self) -> int | None:
        """Return the columns of the terminal. None: lines have no maximum length."""

    def row(self, step: int, metrics: Mapping[str, float], left: float | None = None) -> None:
        """Show chosen metrics of a step, and the remaining seconds of the run."""

    def line(self, text: str) -> None:
        """Show a line."""

    def advance(self, step: int) -> None:
        """Show the number of finished steps."""

    def status(self, text: str) -> None:
        """Show the text about what the run waits for."""

    def close(self) -> None:
        """End the live display."""


class Terminal:
    """Aligned rows that scroll above a bar with the remaining time and the status."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        self._console = console
        self._heading: list[list[str]] = []
        self._rows = 0
        self._roomy = console.width >= ROOMY
        status = TextColumn(
            "{task.fields[status]}", markup=False, style="dim", table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        # Two refreshes a second: the display must not compete with a run for the cores.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=24 if self._roomy else 8),
            MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), status,
            console=console, transient=True, refresh_per_second=2, speed_estimate_period=3600.0,
        )  # fmt: skip
        name = harmless(run.name, 40 if self._roomy else 16, console.encoding)
        self._task = self._progress.add_task(name, total=run.steps or None, completed=run.resumed_from, status="")
        self._progress.start()

    @property
    def width(self) -> int | None:
        """Return the columns of the terminal."""
        return self._console.width

    def row(self, step: int, metrics: Mapping[str, float], left: float | None = None) -> None:
        """Print an aligned row, with a header if the columns change. The bar shows the remaining time."""
        names = [harmless(name, LONGEST_NAME, self._console.encoding) for name in metrics]
        lines, widths = heading(names, self._console.width - len(STEP))
        if not widths:
            named = zip(names, metrics.values(), strict=True)
            self.line(f"step {step}  " + "  ".join(f"{name} {number(value)}" for name, value in named))
            return
        if lines != self._heading or self._rows % ROWS_BETWEEN_HEADERS == 0:
            self._heading, self._rows = lines, 0
            for i, texts in enumerate(lines, 1):
                ends = (STEP, MORE * (len(widths) < len(names))) if i == len(lines) else (" " * len(STEP), "")
                self._print(ends[0] + "".join(map(str.rjust, texts, widths)) + ends[1], "bold")
        self._rows += 1
        shown = zip(metrics.values(), widths, strict=False)  # only the columns that fit
        self._print(f"{step:6d}" + "".join(number(value).rjust(width) for value, width in shown))

    def line(self, text: str) -> None:
        """Print a line above the bar. A narrow terminal wraps it."""
        self._console.print(Text(text, "cyan"))

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step, status="")

    def status(self, text: str) -> None:
        """Show the text behind the bar until the step ends, without its prefix on a narrow terminal."""
        self._progress.update(self._task, status=f"waiting on: {text}" if text and self._roomy else text)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), no_wrap=True, overflow="ellipsis", crop=True)


class Lines:
    """Plain lines without control codes, for files, pipes and services."""

    def __init__(self, console: Console, run: RunInfo, quiet_seconds: float) -> None:
        self._console, self._run, self._quiet_seconds = console, run, quiet_seconds
        self._spoke = time.monotonic()

    @property
    def width(self) -> int | None:
        """Return None: lines have no maximum length."""
        return None

    def row(self, step: int, metrics: Mapping[str, float], left: float | None = None) -> None:
        """Print a line with the name of every number."""
        of = f"/{self._run.steps}" if self._run.steps else ""
        shown = [f"{harmless(name, LONGEST_NAME, self._console.encoding)} {number(v)}" for name, v in metrics.items()]
        shown += [] if left is None else [f"ETA {clock(left)}"]
        self.line(f"step {step}{of}  " + "  ".join(shown))

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()
        self._spoke = time.monotonic()

    def advance(self, step: int) -> None:
        """Do nothing: there is no bar."""

    def status(self, text: str) -> None:
        """Print the status, if nothing was printed for `quiet_seconds`."""
        if text and time.monotonic() - self._spoke >= self._quiet_seconds:
            self.line(f"waiting on: {text}")

    def close(self) -> None:
        """Do nothing: there is no live display."""
