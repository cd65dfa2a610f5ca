"""The run folder: a public contract of plain files, written so that a kill at any moment loses nothing.

config.yaml  identity.json  versions.json  plan.json     what ran
journal.jsonl                                            what happened, an event a line
metrics.jsonl  spans.jsonl                               a line per step, a line per phase
rollouts/step-000012.jsonl  evaluations/step-000010-NAME.jsonl
evaluations/step-000010.json  evaluations/tasks/step-000010-NAME.jsonl
checkpoints/step-000020/    model/    logs/ROLE-RANK.log  logs/waits.log
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from whet.errors import CheckpointError, WhetError

PRIVATE: Final = ("rollouts/", "evaluations/", "endpoint.jsonl")
"""Files of the run folder with what the model was asked and said: prompts may be a company's or a user's own."""


class RunFolder:
    """Writes and reads the files of one run. Creating it touches nothing; `claim` does."""

    def __init__(self, path: str | Path, *, private_records: bool = True) -> None:
        """`private_records`: only this user may read what the model said, see `PRIVATE`; else who the umask lets."""
        self.path = Path(path)
        self._private = private_records
        self._lock: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where the workers' output goes."""
        return self.path / "logs"

    @property
    def scratch(self) -> Path:
        """For files that need not outlast the run."""
        return self.path / "scratch"

    def claim(self) -> None:
        """Make the folder and lock it; a second run in it is refused."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if not isinstance(error, BlockingIOError):
                raise CheckpointError(
                    f"{self.path} cannot be locked: {error.strerror}; choose a run.folder whose file system has locks"
                ) from error
            raise CheckpointError(
                f"{self.path} is in use by another run; wait for it, or choose another run.folder"
            ) from error

    def release(self) -> None:
        """Write what is still to be written, and give the lock back. Safe to call twice."""
        try:
            self.settle()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def has_steps(self) -> bool:
        """Whether there is anything to resume, or to lose: a run that failed before its first step leaves nothing."""
        metrics = self.path / "metrics.jsonl"
        return any(self.checkpoints.glob("step-*")) or (metrics.exists() and metrics.stat().st_size > 0)

    def write_json(self, name: str, value: Any) -> None:
        """Write a small file whole: it is either the old one or the new one."""
        self.write_text(name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a small text file whole."""
        target = self.path / name
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(target.name + ".partial")
            with partial.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(target)

    def read_json(self, name: str) -> Any:
        """Read a JSON file; None where there is none."""
        try:
            with reading(self.path / name):
                return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from error

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append JSON lines. They survive a kill at once, and a power cut after the next `sync`."""
        left = "".join(map(json_line, rows)).encode()
        if not left:
            return
        target = self.path / name
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if self._private and name.startswith(PRIVATE) else 0o666
            with open(target, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, mode)) as stream:
                end = stream.tell()
                try:
                    while left:
                        left = left[stream.write(left) :]
                except OSError:
                    stream.truncate(end)  # all rows or none: what is there stays readable
                    raise

    def append_later(self, name: str, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Append rows that are made and written on another thread; what fails is raised by the next call or `sync`."""
        self.settle()
        self._writer = self._writer or ThreadPoolExecutor(1, "whet rows")
        self._writing = self._writer.submit(lambda: self.append(name, rows()))

    def settle(self) -> None:
        """Wait until what was to be appended later is written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def sync(self) -> None:
        """Make the rows of all steps so far durable, as is needed before a checkpoint that builds on them."""
        self.settle()
        for name in ("metrics.jsonl", "spans.jsonl", "journal.jsonl"):
            file = self.path / name
            if file.exists():
                with disk_errors(file), file.open("rb") as stream:
                    os.fsync(stream.fileno())

    def began(self) -> datetime:
        """Give the time of the run's first sitting; now where this is it. Templates that show a date keep to it."""
        file = self.path / "journal.jsonl"
        first = next(iter(read_rows(file)), {}) if file.exists() else {}
        try:
            return datetime.fromtimestamp(first.get("time", time.time()))
        except (TypeError, ValueError, OverflowError, OSError) as error:
            raise CheckpointError(
                f"{file}, first line: the time {first['time']!r:.60} is no time in seconds; it is that of the run's "
                "first sitting, and what a chat template shows of the date depends on it"
            ) from error

    def journal(self, event: str, **details: Any) -> None:
        """Note what happened."""
        self.append("journal.jsonl", [{"time": round(time.time(), 3), "event": event, **details}])

    def rewind(self, step: int) -> None:
        """Forget what was written of later steps: they will be taken again. The journal remembers, and says so."""
        if (self.path / "journal.jsonl").exists():
            self._keep_rows("journal.jsonl", math.inf)
            self.journal("rewound", after_step=max(0, step))
        for name in ("metrics.jsonl", "spans.jsonl"):
            self._keep_rows(name, step)
        for pattern in ("rollouts/step-*.jsonl", "evaluations/step-*.json*", "evaluations/tasks/step-*.jsonl"):
            for file in self.path.glob(pattern):
                if (step_of(file.name) or 0) > step and not file.is_dir():
                    file.unlink()
        for unfinished in self.checkpoints.glob("*.partial"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _keep_rows(self, name: str, step: float) -> None:
        file = self.path / name
        if not file.exists():
            return
        self.write_text(name, "".join(json_line(row) for row in read_rows(file) if _is_kept(row, step)))


def _is_kept(row: Mapping[str, Any], step: float) -> bool:
    number = row.get("step", 0)
    return step == math.inf or (isinstance(number, int) and number <= step)


def step_of(name: str) -> int | None:
    """Return the step in the name of a file, e.g. of `step-000010-NAME.jsonl`; None where it has none."""
    found = _STEP_NAME.match(name)
    return int(found[1]) if found else None


_STEP_NAME = re.compile(r"step-([0-9]{6,15})(?![0-9])")


def private(path: str, flags: int) -> int:
    """Open a file that only this user may read, if it is made anew: an `opener` of `open`."""
    return os.open(path, flags, 0o600)


def use_umask(*files: Path) -> None:
    """Set the mode of files to the one that this process's umask has for new files.

    Libraries that write a file under another name first, such as safetensors, leave it readable by its owner alone.
    """
    mode = 0o666 & ~_umask()
    for file in files:
        file.chmod(mode)


def _umask() -> int:
    with suppress(OSError):  # Linux; nothing has to be changed to find out
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


def json_line(row: Mapping[str, Any]) -> str:
    """Write a row as a line of JSON: readable text, but what could steer a terminal as an escape."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(row, ensure_ascii=False)) + "\n"


_STEERING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters that JSON allows, line breaks, marks of writing direction, and halves of characters."""


def read_rows(file: Path, wanted: Callable[[str], bool] = lambda line: True) -> Iterator[dict[str, Any]]:
    """Read JSON lines; those that a kill or a power cut left damaged, or that are not wanted, are left out.

    Raises `FileNotFoundError`, and `WhetError` saying why a file that is there cannot be read.
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
    """Raise `WhetError` saying in plain words why a file that is there cannot be read, e.g. because it is a folder."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WhetError(f"cannot read {file}: {error.strerror or error}") from error


def read_metrics(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the numbers of each step from a `metrics.jsonl`; a step may come twice. Nothing where there is no file."""
    return metrics_of(read_rows(file) if file.exists() else ())


def metrics_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Give the numbers of each row of a `metrics.jsonl`. What is too large for a float is infinite."""
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and 0 <= step < _MOST_STEPS:
            yield step, {name: _float(v) for name, v in row.items() if isinstance(v, int | float) and name not in _WHEN}


_WHEN = ("step", "time")
_MOST_STEPS = 1 << 53
"""Beyond which numbers are no steps: readers take them for floats."""


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in plain words which file could not be written, and why."""
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            cause = "the disk is full; free some space and start the same command again: it resumes"
        elif number is not None:
            cause = os.strerror(number)
        elif isinstance(error, OSError):
            cause = str(error)
        else:
            raise
        raise WhetError(f"cannot write {path}: {cause}") from error


def _error_number(error: Exception) -> int | None:
    """Give the system's number of an error. Libraries in Rust, such as safetensors, have it in their text alone."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)$", str(error))
    return int(told[1]) if told else None
