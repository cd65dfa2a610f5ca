"""Read the metrics of a finished run, for tests that compare runs."""

from pathlib import Path
from typing import Any

from whet.data.files import read_rows


def numbers(run: Path, *apart: str) -> list[dict[str, Any]]:
    """Return the metrics of each step, without timings and without metrics that begin with a word of `apart`."""
    left_out = ("seconds/", "memory/", *apart)
    rows = read_rows(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(left_out)} for row in rows]
