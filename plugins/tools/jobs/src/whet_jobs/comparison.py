"""Compares two evaluations task by task. A task's difficulty is the same in both, so it cancels out."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from whet.data.files import read_rows, reading
from whet.errors import DataError
from whet.evaluation.estimators import Estimate, estimate
from whet.evaluation.result import FORMAT, EvaluationResult
from whet.evaluation.task_scores import TaskScore
from whet_jobs.tables import aligned, interval

SUMMARY = "evaluation.json"

Rows = Mapping[int, Mapping[str, Any]]


@frozen(eq=False)
class Comparison:
    """By how much one evaluation is above another."""

    against: str
    differences: Mapping[tuple[str, str], Estimate]
    """(environment, figure) -> the mean over tasks of the difference in the figure, with its interval."""
    notes: tuple[str, ...]
    """The parts that could not be compared, and why."""

    def summary(self) -> dict[str, Any]:
        """Return the comparison as builtins."""
        environments: dict[str, dict[str, Any]] = {}
        for (environment, figure), found in self.differences.items():
            environments.setdefault(environment, {})[figure] = asdict(found)
        return {"against": self.against, "differences": environments, "notes": list(self.notes)}

    def table(self) -> str:
        """Return every difference on a line, with its interval."""
        rows = [
            (environment, figure, f"{found.value:+.4f}", interval(found.low, found.high), str(found.tasks))
            for (environment, figure), found in self.differences.items()
        ]
        heading = ("environment", "figure", "difference", "95 % interval", "tasks")
        return "\n".join([f"against {self.against}, task by task", *aligned([heading, *rows]), *self.notes])


@frozen(eq=False)
class Written:
    """An evaluation that was read from files."""

    path: Path
    """Path of its summary."""
    environments: Mapping[str, Any]
    rows: Mapping[str, Rows]
    """Rows by environment and task."""


def read_written(path: Path) -> Written:
    """Read an evaluation: its summary, or its folder. Raises `DataError` if it is none."""
    path = path / SUMMARY if path.is_dir() else path
    try:
        with reading(path):
            summary = json.loads(path.read_text(encoding="utf-8"))
        found, environments = summary["format"], summary["environments"]
        files = {name: path.parent / environments[name]["task_rows"] for name in environments}
        rows = {name: {row["task"]: row for row in read_rows(file)} for name, file in files.items()}
        numbers = [value for tasks in rows.values() for row in tasks.values() for value in _values(row).values()]
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers):
            raise ValueError("a value of a task is no finite number")
    except FileNotFoundError as error:
        raise DataError(
            f"there is no {error.filename}; wanted what `whet eval --out` or a run's evaluation wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is no summary of an evaluation; wanted {SUMMARY} of `whet eval --out`") from error
    if found != FORMAT:
        raise DataError(f"{path} has the format {found!r}, wanted {FORMAT}: evaluate again with this version of whet")
    return Written(path, environments, rows)


def _values(row: Mapping[str, Any]) -> Mapping[str, Any]:
    values = row.get("values") or {}
    if not isinstance(values, Mapping):
        raise TypeError("the values of a task are no mapping")
    return values


def compare(result: EvaluationResult, other: Written) -> Comparison:
    """Return the comparison of a result with an evaluation that was written before.

    Each task counts by the difference of its two values, and the interval is Student's of these differences: the paired
    comparison of Miller 2024, section 4.2 (arXiv:2411.00640). If no value differs, and all are between 0 and 1, the
    interval is as wide as the share of tasks that may differ at most (Clopper and Pearson 1934): 1 - 0.025^(1/tasks). A
    task with another prompt in the other evaluation is left out.
    """
    differences: dict[tuple[str, str], Estimate] = {}
    notes: list[str] = []
    for here in result.environments:
        if here.name not in other.environments:
            notes.append(f"{here.name} is not in {other.path}")
            continue
        passing, rows = other.environments[here.name].get("passing"), other.rows[here.name]
        alike = passing == asdict(here.passing)
        if not alike:
            notes.append(f"{here.name}: pass@k and maj@k are left out, as something else passes there: {passing}")
        pairs = [(task, rows[task.task]) for task in here.tasks if _same(task, rows.get(task.task))]
        scored = sum(bool(task.samples) for task in here.tasks)
        if len(pairs) < scored:
            notes.append(f"{here.name}: {scored - len(pairs)} of {scored} tasks have no counterpart there")
        for name in here.figures:
            if alike or not name.startswith(("pass@", "maj@")):
                values = [(t.values[name], row["values"][name]) for t, row in pairs if name in _both(t, row)]
                differences |= {(here.name, name): _difference(values)} if values else {}
    return Comparison(str(other.path), differences, tuple(notes))


def _difference(values: Sequence[tuple[float, float]]) -> Estimate:
    found = estimate([here - there for here, there in values])
    if found.low is None or any(here != there or not 0 <= here <= 1 for here, there in values):
        return found
    most = 1 - 0.025 ** (1 / len(values))
    return evolve(found, low=-most, high=most)


def _same(task: TaskScore, row: Mapping[str, Any] | None) -> bool:
    return bool(task.samples and row and row.get("asked") == task.asked and row.get("values"))


def _both(task: TaskScore, row: Mapping[str, Any]) -> set[str]:
    return set(task.values) & set(row["values"])
