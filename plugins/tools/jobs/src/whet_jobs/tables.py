"""Figures of evaluations as tables of text."""

from collections.abc import Iterable, Sequence

from whet.evaluation.result import EvaluationResult


def table(evaluated: EvaluationResult) -> str:
    """Return every figure on a line, with its interval, and below them what was left out."""
    rows = [
        (result.name, name, f"{found.value:.4f}", interval(found.low, found.high), str(found.tasks))
        for result in evaluated.environments
        for name, found in result.figures.items()
    ]
    heading = ("environment", "figure", "mean", "95 % interval", "tasks")
    return "\n".join([*aligned([heading, *rows]), *_notes(evaluated)])


def _notes(evaluated: EvaluationResult) -> Iterable[str]:
    for result in evaluated.environments:
        if result.dropped:
            yield (
                f"{result.name}: {result.dropped} of {result.dropped + result.episodes} episodes failed, "
                f"{result.infrastructure} of them by their infrastructure; they count in no figure. One of them: "
                f"{result.failure}"
            )
        if result.undecided:
            yield (
                f"{result.name}: graders could not decide about {result.undecided} responses of {result.episodes} "
                "episodes; they count as wrong"
            )
        yield from (f"{result.name}, {name}: {why}" for name, why in result.missing.items())


def interval(low: float | None, high: float | None) -> str:
    """Return an interval as text; a dash if there is none."""
    return "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with aligned columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
