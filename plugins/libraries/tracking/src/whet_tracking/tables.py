"""Rows of the run folder as tables with columns, and histograms as bins, in the form in which trackers take both."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Table = tuple[list[str], list[list[Any]]]
"""Columns, and a list of cells for each row."""

EPISODE = (
    "environment", "task", "sample", "reward", "advantage", "turns", "response_length", "stop", "answer", "gold",
)  # fmt: skip
"""Keys of an episode's row that become columns."""
FAILURES = ("group dropped", "replica restarted", "run restarted", "watcher failed", "failed")
"""Lines of the journal that tell of a failure."""
LONGEST = 20_000
"""Characters of a cell."""


def episodes(rows: Iterable[Row], step: int | None, most: int) -> Table:
    """Return a table of the first episodes, with the text before the model's first response and the text after."""
    columns = ["step", *EPISODE, "prompt", "response"]
    return columns, [
        [step, *(cell(row.get(key)) for key in EPISODE), *map(cell, _texts(row))]
        for row, _ in zip(rows, range(most), strict=False)
    ]


def _texts(row: Row) -> tuple[str, str]:
    messages = [(str(m["role"]), str(m["content"])) for m in row.get("messages", ())]
    begin = next((i for i, (role, _) in enumerate(messages) if role == "assistant"), len(messages))
    told = [text if role == "assistant" else f"({role}) {text}" for role, text in messages[begin:]]
    return "\n".join(text for _, text in messages[:begin]), "\n".join(told)


def any_table(rows: Sequence[Row], step: int | None) -> Table:
    """Return a table of rows that need not have the same keys."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    return ["step", *names], [[step, *(cell(row.get(name)) for name in names)] for row in rows]


def failures(journal: Iterable[Row]) -> Table:
    """Return a table of the failures in a journal."""
    rows = [row for row in journal if row.get("event") in FAILURES]
    told = [{key: value for key, value in row.items() if key not in ("time", "event")} for row in rows]
    return ["time", "event", "details"], [
        [row.get("time"), row["event"], cell(json.dumps(details, ensure_ascii=False))]
        for row, details in zip(rows, told, strict=True)
    ]


def cell(value: Any) -> Any:
    """Return a value as what every tracker can show: a number, a text of bounded length, or None."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} ... ({len(text):,} characters)"
    return text.encode("utf-8", "replace").decode("utf-8")


def bins(edges: Sequence[float], counts: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return counts and the bounds of their bins. The bins at both ends are as wide as their neighbours."""
    first, last = edges[:2], edges[-2:]
    low, high = first[0] - (first[-1] - first[0]), last[-1] + (last[-1] - last[0])
    return list(counts), [low if low < first[0] else first[0] - 1, *edges, high if high > last[-1] else last[-1] + 1]
