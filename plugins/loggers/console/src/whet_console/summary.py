"""The summary at the end of a run: the change of metrics, the time of phases, and a few responses."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from whet_console.display import chosen, harmless, number, with_interval
from whet_console.history import Change, History
from whet_console.responses import Pair, Response

LONGEST_NAME = 400
SMALLEST_SHARE = 0.01
"""Phases with a smaller share of the time are left out."""


def summary(history: History, patterns: Sequence[str], encoding: str, console: Console) -> Group:
    """Return the tables for which the run has numbers, in a width that fits the console."""
    parts: list[RenderableType] = []
    judgements = history.judgements()
    if judgements:
        tables = [_judgements(judgements, history, encoding, shown) for shown in JUDGEMENTS]
        options = console.options.update(max_width=sys.maxsize)
        fitting = (t for t in tables if Measurement.get(console, options, t).maximum <= console.width)
        parts += [next(fitting, tables[-1]), Text()]
    trained = [name for name in chosen(history.last, patterns) if name not in history.judged]
    if trained:
        parts += [_training([Change(n, history.first[n], history.last[n]) for n in trained], encoding), Text()]
    if sum(history.seconds.values()) > 0:
        parts += [*_phases(history.seconds, encoding), Text()]
    return Group(*parts)


def responses(pairs: Sequence[Pair], limit: int, encoding: str) -> Group:
    """Return responses before and after training. Their text is untrusted: it is never interpreted as markup."""
    parts: list[RenderableType] = []
    for pair in pairs:
        first, last = pair.steps
        title = f"{harmless(pair.environment, 40, encoding)}, task {pair.task}"
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column()
        grid.add_row("asked", "", Text(harmless(pair.before.prompt, limit, encoding)))
        for label, response in ((f"step {first}", pair.before), (f"step {last}", pair.after)):
            grid.add_row(label, _worth(response), Text(harmless(response.text, limit, encoding)))
        parts += [Text(title, "bold"), grid, Text()]
    return Group(*parts)


def show(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print an empty line, then the parts."""
    console.print()
    for part in parts:
        console.print(part)
    console.file.flush()


def _worth(response: Response) -> Text:
    return Text(number(response.reward), "green" if response.reward > 0 else "red")


JUDGEMENTS = (
    ("interval", "first", "last", "best", "at step"), ("first", "last", "best", "at step"), ("first", "last"), ("last",)
)  # fmt: skip
"""Choices of columns for the table of evaluations. The first that fits the console is used. Names are never cut."""


def _judgements(changes: Sequence[Change], history: History, encoding: str, shown: Sequence[str]) -> Table:
    columns = [column for column in shown if column != "interval"]
    table = _table("evaluation", columns)
    for change in changes:
        steps = [step for step, _ in history.judged[change.name]]
        bounds = history.intervals(change.name) if "interval" in shown else {}
        cells = {
            "first": with_interval(change.first, bounds.get(steps[0], ())),
            "last": with_interval(change.last, bounds.get(steps[-1], ())),
            "best": "" if change.best is None else number(change.best),
            "at step": "" if change.best is None else str(change.best_step),
        }
        table.add_row(_name(change.name.removeprefix("evaluation/"), encoding), *(cells[name] for name in columns))
    return table


def _training(changes: Sequence[Change], encoding: str) -> Table:
    table = _table("training", ("first", "last"))
    for change in changes:
        table.add_row(_name(change.name, encoding), number(change.first), number(change.last))
    return table


def _phases(seconds: dict[str, float], encoding: str) -> list[RenderableType]:
    """Return a table of phases with their share of the steps' time. Phases may overlap or contain each other."""
    table, shares = _table("phases", ("seconds", "share of steps")), 0.0
    phases = {phase: spent for phase, spent in seconds.items() if phase != "step" and not phase.endswith(".start")}
    whole = seconds.get("step") or sum(phases.values())
    for phase, spent in sorted(phases.items(), key=lambda item: -item[1]):
        if spent >= SMALLEST_SHARE * whole:
            table.add_row(_name(phase, encoding), f"{spent:.2f}", f"{100 * spent / whole:.0f} %")
            shares += spent / whole
    if shares <= 1 + SMALLEST_SHARE:
        return [table]
    return [table, Text("Shares add up to more than 100 %: some phases run at one time, or within another.", "dim")]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, overflow="fold")  # a cut name could be the name of another metric
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(name: str, encoding: str) -> Text:
    return Text(harmless(name, LONGEST_NAME, encoding))
