"""Files of the run folder: rows of JSON that a kill may have damaged, file modes, and readable disk errors."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from whet.errors import WhetError


def step_of(name: str) -> int | None:
    """Return the step in a file's name, e.g. of `step-000010-NAME.jsonl`. None: the name has none."""
    found = _STEP_NAME.match(name)
    return int(found[1]) if found else None


_STEP_NAME = re.compile(r"step-([0-9]{6,15})(?![0-9])")


def private(path: str, flags: int) -> int:
    """Open a file as an `opener` of `open`. A new file can be read by this user only."""
    return os.open(path, flags, 0o600)


def use_umask(*files: Path) -> None:
    """Set the mode of files to the mode that new files of this process have (its umask).

    Libraries that write to a temporary name first, such as safetensors, leave a file readable by its owner only.
    """
    mode = 0o666 & ~_umask()
    for file in files:
        file.chmod(mode)


def _umask() -> int:
    with suppress(OSError):  # on Linux the umask can be read without changing it
        if found := re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE):
            return int(found[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def remove_folder(folder: Path) -> None:
    """Remove a folder as far as possible; of a link, the link alone."""
    folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


def fsync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON: readable text, with characters that could control a terminal escaped."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(row, ensure_ascii=False)) + "\n"


_STEERING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters that JSON allows, line breaks, marks of writing direction, and surrogates."""


def read_rows(file: Path, wanted: Callable[[str], bool] = lambda line: True) -> Iterator[dict[str, Any]]:
    """Read JSON lines. Skip lines that a kill or a power cut damaged, and lines for which `wanted` returns False.

    Raises `FileNotFoundError`, or `WhetError` with the reason if an existing file cannot be read.
    """
    with reading(file), file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if not line.endswith("\n"):
                return
            if not wanted(line):
                continue
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise `WhetError` with a plain reason if an existing file cannot be read, e.g. because it is a folder."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WhetError(f"cannot read {file}: {error.strerror or error}") from error


def read_metrics(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the numbers of each step from a `metrics.jsonl`. A step may appear twice. No file: yield nothing."""
    return metrics_of(read_rows(file) if file.exists() else ())


def metrics_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step and the numbers of each row of a `metrics.jsonl`. A number too large for a float is infinite."""
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and 0 <= step < _MOST_STEPS:
            yield step, {name: _float(v) for name, v in row.items() if isinstance(v, int | float) and name not in _WHEN}


_WHEN = ("step", "time")
_MOST_STEPS = 1 << 53
"""Larger numbers are no steps: readers would take them for floats."""


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `WhetError` with the file that could not be written, and the reason."""
    try:
        yield
    except Exception as error:
        if (number := _error_number(error)) is None and not isinstance(error, OSError):
            raise
        cause = str(error) if number is None else os.strerror(number)
        if number in (errno.ENOSPC, errno.EDQUOT):
            cause = "the disk is full; free some space, and start the same command again"
        raise WhetError(f"cannot write {path}: {cause}") from error


def _error_number(error: Exception) -> int | None:
    """Return the system's error number (errno). Libraries in Rust, such as safetensors, have it only in the text."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)$", str(error))
    return int(told[1]) if told else None
