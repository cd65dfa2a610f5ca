"""The logger: rows during the run, a summary at its end."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from whet.data.files import read_metrics
from whet.interfaces.logger import RunInfo
from whet_console import summary
from whet_console.config import ConsoleConfig
from whet_console.display import chosen, harmless, number, with_interval
from whet_console.hints import Hints
from whet_console.history import BOUNDS, COUNTS, STARTUP, VALIDATION, History, possible
from whet_console.pace import TOKENS_PER_SECOND, Pace
from whet_console.responses import pairs
from whet_console.views import Lines, Terminal, View

LONGEST_LINE = 4_000
"""In characters. Only very long lines are cut, because the end of a line may contain the name of a metric."""
PLAIN_WIDTH = 120
"""Width in columns if standard output is not a terminal."""


class ConsoleLogger:
    """Shows a run on standard output."""

    def __init__(self, config: ConsoleConfig, run: RunInfo, console: Console | None = None) -> None:
        console = console or Console(highlight=False)
        live = console.is_terminal and not console.is_dumb_terminal
        self._console, self._config, self._run = console, config, run
        self._view: View = Terminal(console, run) if live else Lines(console, run, config.quiet_seconds)
        self._closed = False
        self._hints = Hints()
        self._pace = Pace()
        self._history = self._recorded(run.resumed_from or -1)
        if run.resumed_from:
            self._view.line(f"resumed after step {run.resumed_from}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the lines of a step: its row if it is due, startup, validation, evaluation and hints."""
        self._history.add(step, metrics)
        self._pace.after(step, metrics)
        if step and (step % self._config.every == 0 or step in (1, self._run.steps)):
            row = self._row(metrics)
            if row:
                self._view.row(step, row, self._pace.left(self._run.steps))
            self._pace.begin_row()
        encoding, width = self._console.encoding, self._view.width
        hints = filter(None, (self._hints.after(metrics), self._hints.undecided(step, metrics)))
        judged = [*validation_lines(step, metrics), *evaluation_lines(step, metrics, width)]
        for line in [*startup_lines(metrics), *judged, *hints]:
            self._view.line(harmless(line, LONGEST_LINE, encoding))
        self._view.advance(step)

    def _row(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the columns of a row: metrics, then seconds and tokens."""
        row = {name: metrics[name] for name in chosen(metrics, self._config.metrics)}
        pace = self._pace.row()
        if self._config.metrics or "reward/mean" in metrics:
            pace.pop(TOKENS_PER_SECOND, None)
        return {**row, **pace} if row else {}

    def status(self, text: str) -> None:
        """Show the text about what the run waits for."""
        self._view.status(harmless(text, 100, self._console.encoding))

    def rewind(self, step: int) -> None:
        """Forget later steps, and print a line about it."""
        self._history = self._recorded(step)
        self._pace.rewind()
        self._view.line(f"workers were lost; again after step {max(step, 0)}")
        self._view.advance(max(step, 0))

    def close(self, failed: bool) -> None:
        """End the live display and print the summary."""
        if self._closed:
            return
        self._closed = True
        self._view.close()
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, PLAIN_WIDTH)
        encoding, config = self._console.encoding, self._config
        end = f"failed after step {self._history.step}" if failed else f"ended at step {self._history.step}"
        name, folder = harmless(self._run.name, 60, encoding), harmless(_short(self._run.folder), 400, encoding)
        parts: list[RenderableType] = [
            Text(f"{name} {end}; everything it wrote is in {folder}", "bold red" if failed else "bold green"),
            Text(),
            summary.summary(self._history, config.metrics, encoding, self._console),
            summary.responses(pairs(self._run.folder, config.responses), config.response_characters, encoding),
        ]
        summary.show(self._console, parts)

    def _recorded(self, last: int) -> History:
        """Return the history of the steps up to `last`, from the run folder."""
        history = History()
        for step, metrics in read_metrics(self._run.folder / "metrics.jsonl"):
            if step <= last:
                history.add(step, metrics)
        return history


def _short(folder: Path) -> str:
    """Return the path relative to the working directory if the folder is below it, else the whole path."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def startup_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return a line about the time until the first step, longest part first; no line if the metrics lack it."""
    if STARTUP not in metrics:
        return []
    inside = f"{STARTUP}."
    parts = {name.removeprefix(inside): value for name, value in metrics.items() if name.startswith(inside)}
    told = [f"{name} {value:.1f}" for name, value in sorted(parts.items(), key=lambda part: -part[1]) if value >= 0.05]
    return [f"the first step was over after {metrics[STARTUP]:.1f} s: " + ", ".join(told)]


def validation_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Return one line with the validation metrics, or none if there are none."""
    found = {name.removeprefix(VALIDATION): value for name, value in metrics.items() if name.startswith(VALIDATION)}
    figures = ", ".join(f"{name} {number(found[name])}" for name in sorted(found))
    return [f"validation after step {step}: {figures}"] if found else []


def evaluation_lines(step: int, metrics: Mapping[str, float], width: int | None = None) -> list[str]:
    """Return one line for each evaluated environment.

    If a line is wider than `width`, its intervals are left out: first all except the reward's, then the reward's, too,
    if the line fits then.
    """
    environments: dict[str, dict[str, tuple[float, list[float]]]] = {}
    for name in sorted(metrics, key=lambda name: (not name.endswith("/reward"), name)):
        if name.startswith("evaluation/") and not name.endswith(BOUNDS):
            environment, _, figure = name.removeprefix("evaluation/").partition("/")
            shown = environments.setdefault(environment, {})
            if f"/{figure}" not in COUNTS or metrics[name]:
                shown[figure] = (
                    metrics[name],
                    possible(name, [metrics[name + b] for b in BOUNDS if name + b in metrics]),
                )
    return [_evaluation(name, step, environments[name], width) for name in sorted(environments)]


def _evaluation(name: str, step: int, figures: Mapping[str, tuple[float, list[float]]], width: int | None) -> str:
    lines = []
    for with_bounds in (figures.keys(), {"reward"}, frozenset[str]()):
        shown = [
            f"{figure} {with_interval(value, bounds if figure in with_bounds else ())}"
            for figure, (value, bounds) in figures.items()
        ]
        lines.append(f"evaluation of {name} after step {step}: {', '.join(shown)}")
    return next((line for line in lines if width is None or len(line) <= width), lines[1])
