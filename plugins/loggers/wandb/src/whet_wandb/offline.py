"""What earlier run attempts left in the folder of W&B, read by W&B's own reader (`wandb leet inspect`)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet_tracking.logger import ATTEMPT, STEP

SECONDS = 300
"""Limit for reading the file of one run attempt."""


def last_row(folder: Path, run_id: str) -> tuple[int, int]:
    """Return the last row and the last step that W&B has of a run in this folder; -1: none."""
    row = step = -1
    for file in reversed(files(folder, run_id)):
        for values in history(file):
            row, step = max(row, values["_step"]), values[STEP] if ATTEMPT in values else step
        if step >= 0:
            break
    return row, step


def files(folder: Path, run_id: str) -> list[Path]:
    """Return the file of each run attempt of a run, the oldest first.

    The folder of an attempt is named `offline-run-DATE_TIME-ID`; W&B adds `-1`, `-2` where several begin in one second.
    """
    found = [
        (match["time"], int(match["count"] or 0), file)
        for file in folder.glob(f"wandb/*/run-{run_id}.wandb")
        if (match := re.fullmatch(rf"(offline-)?run-(?P<time>\w+)-{run_id}(-(?P<count>\d+))?", file.parent.name))
    ]
    return [file for _, _, file in sorted(found)]


def history(file: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of a file, in order. The end of a file whose run was killed may be missing."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            yield record["history"]["item"]
