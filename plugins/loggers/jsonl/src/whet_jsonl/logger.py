"""The logger: one line for each step, written to disk before the next step begins."""

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
    """Writes `{"step": n, NAME: number, ...}`. Numbers that are not finite become null, as JSON has none."""

    def __init__(self, config: JsonlConfig, run: RunInfo) -> None:
        self._config = config
        self._file: TextIO | None = None
        if config.path == STANDARD_OUTPUT:
            self._out: TextIO = sys.stdout
        else:
            self._out = self._file = _open(run.folder / os.path.expanduser(config.path), run.resumed_from or -1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step, unless no metric of the step is wanted."""
        wanted = {name: metrics[name] for name in sorted(metrics) if self._wants(name)}
        if not wanted:
            return
        row = {name: value if math.isfinite(value) else None for name, value in wanted.items()}
        self._out.write(json.dumps({"step": step, **row}) + "\n")
        self._out.flush()

    def status(self, text: str) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps from the file. Lines on standard output stay."""
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
    """Return the file, open to append, without lines of steps that will be repeated. -1: an empty file."""
    kept = []
    if resumed_from >= 0 and path.exists():
        with path.open(encoding="utf-8") as lines:
            kept = [line for line in lines if _step(line) <= resumed_from]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary file and moved, so that a kill at this point loses no line.
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(kept), encoding="utf-8")
    os.replace(beside, path)
    return path.open("a", encoding="utf-8")


def _step(line: str) -> float:
    """Return the step of a line. Infinity for an unreadable line of a killed run, so that it is dropped."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
