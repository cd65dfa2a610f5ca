"""The logger: a line for each step, on disk before the next step begins."""

import json
import math
import os
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from whet.interfaces.logger import RunInfo
from whet_jsonl.config import STANDARD_OUTPUT, JsonlConfig


class JsonlLogger:
    """Writes `{"step": n, NAME: number, ...}`; numbers that are not finite become null, as JSON has none."""

    def __init__(self, config: JsonlConfig, run: RunInfo) -> None:
        self._config = config
        self._file: TextIO | None = None
        if config.path == STANDARD_OUTPUT:
            self._out: TextIO = sys.stdout
        else:
            self._out = self._file = _open(run.folder / config.path, run.resumed_from or -1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's line. A step of which nothing is wanted writes none."""
        wanted = {name: metrics[name] for name in sorted(metrics) if self._wants(name)}
        if not wanted:
            return
        row = {name: value if math.isfinite(value) else None for name, value in wanted.items()}
        self._out.write(json.dumps({"step": step, **row}) + "\n")
        self._out.flush()

    def status(self, text: str) -> None:
        """Ignored."""

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps; what standard output got stays."""
        if self._file:
            self._file.close()
            self._out = self._file = _open(Path(self._file.name), step)

    def close(self, failed: bool) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _wants(self, name: str) -> bool:
        included = any(fnmatchcase(name, pattern) for pattern in self._config.include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self._config.exclude)


def _open(path: Path, resumed_from: int) -> TextIO:
    """Open for appending after the lines of steps that will not be repeated; -1: with an empty file."""
    kept = []
    if resumed_from >= 0 and path.exists():
        with path.open(encoding="utf-8") as lines:
            kept = [line for line in lines if _step(line) <= resumed_from]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved, so that a run killed right here loses no line.
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    os.replace(beside, path)
    return path.open("a", encoding="utf-8")


def _step(line: str) -> float:
    """Give the step of a line; infinity where a killed run left it unreadable, so that it is dropped."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
