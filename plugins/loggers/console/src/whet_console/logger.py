"""The logger: rows while the run goes on, a summary when it ends."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from whet.interfaces.logger import RunInfo
from whet.run_folder import read_metrics
from whet_console import summary
from whet_console.answers import pairs
from whet_console.config import ConsoleConfig
from whet_console.display import chosen, harmless, with_interval
from whet_console.hints import Hints
from whet_console.history import BOUNDS, STARTUP, History
from whet_console.views import Lines, Terminal, View

PLAIN_WIDTH = 120
"""Columns assumed where nobody says."""


class ConsoleLogger:
    """Shows a run on standard output."""

    def __init__(self, config: ConsoleConfig, run: RunInfo, console: Console | None = None) -> None:
        console = console or Console(highlight=False)
        live = console.is_terminal and not console.is_dumb_terminal
        self._console, self._config, self._run = console, config, run
        self._view: View = Terminal(console, run) if live else Lines(console, run, config.quiet_seconds)
        self._closed = False
        self._hints = Hints()
        self._history = self._recorded(run.resumed_from or -1)
        if run.resumed_from:
            self._view.line(f"resumed after step {run.resumed_from}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step's evaluation if it has one, and its row when it is due."""
        self._history.add(step, metrics)
        row = {name: metrics[name] for name in chosen(metrics, self._config.metrics)}
        if row and step and (step % self._config.every == 0 or step in (1, self._run.steps)):
            self._view.row(step, row)
        encoding = self._console.encoding
        hint = self._hints.after(metrics)
        for line in [*startup_lines(metrics), *evaluation_lines(step, metrics), *([hint] if hint else [])]:
            self._view.line(harmless(line, 400, encoding))
        self._view.advance(step)

    def status(self, text: str) -> None:
        """Show what the run waits for."""
        self._view.status(harmless(text, 100, self._console.encoding))

    def rewind(self, step: int) -> None:
        """Forget later steps, and say so."""
        self._history = self._recorded(step)
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
            summary.summary(self._history, config.metrics, encoding),
            summary.answers(pairs(self._run.folder, config.answers), config.answer_characters, encoding),
        ]
        summary.show(self._console, parts)

    def _recorded(self, last: int) -> History:
        """Read the steps up to one from the run folder."""
        history = History()
        for step, metrics in read_metrics(self._run.folder / "metrics.jsonl"):
            if step <= last:
                history.add(step, metrics)
        return history


def _short(folder: Path) -> str:
    """Give the path from here where the folder is below."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def startup_lines(metrics: Mapping[str, float]) -> list[str]:
    """Write a line about the time to the first step, where it is told, with what took most of it first."""
    if STARTUP not in metrics:
        return []
    inside = f"{STARTUP}."
    parts = {name.removeprefix(inside): value for name, value in metrics.items() if name.startswith(inside)}
    told = [f"{name} {value:.1f}" for name, value in sorted(parts.items(), key=lambda part: -part[1]) if value >= 0.05]
    return [f"the first step was over after {metrics[STARTUP]:.1f} s: " + ", ".join(told)]


def evaluation_lines(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Write one line for each evaluated environment."""
    environments: dict[str, list[str]] = {}
    for name in sorted(metrics, key=lambda name: (not name.endswith("/reward"), name)):
        if name.startswith("evaluation/") and not name.endswith(BOUNDS):
            environment, _, figure = name.removeprefix("evaluation/").partition("/")
            shown = environments.setdefault(environment, [])
            if figure != "dropped" or metrics[name]:
                bounds = [metrics[name + end] for end in BOUNDS if name + end in metrics]
                shown.append(f"{figure} {with_interval(metrics[name], bounds)}")
    return [f"evaluation of {name} after step {step}: {', '.join(environments[name])}" for name in sorted(environments)]
