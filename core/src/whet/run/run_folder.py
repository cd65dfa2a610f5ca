"""The run folder: a public contract of plain files, written so that a kill at any moment loses nothing.

config.yaml  identity.json  versions.json  plan.json     what ran
journal.jsonl                                            what happened, an event a line
metrics.jsonl  histograms.jsonl  spans.jsonl             a line per step, per histogram of a step, per phase
rollouts/step-000012.jsonl  evaluations/step-000010-NAME.jsonl  tables/step-000012-NAME.jsonl
evaluations/step-000010.json  evaluations/tasks/step-000010-NAME.jsonl
checkpoints/step-000020/    model/    logs/ROLE-RANK.log  logs/waits.log
"""

import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from whet.data.files import disk_errors, fsync, json_line, read_rows, reading, remove_folder, step_of
from whet.errors import CheckpointError
from whet.interfaces.logger import Event
from whet.runtime.watchdog import watchdog

PRIVATE: Final = ("rollouts/", "evaluations/", "tables/", "endpoint.jsonl")
"""Files of the run folder with prompts and responses: they may have private data of a company or a user."""
STEPS: Final = ("metrics.jsonl", "histograms.jsonl", "spans.jsonl")
"""Files of rows that name their step."""
SAMPLED_ROWS: Final = 64
"""Rollouts of a step that loggers see."""


class RunFolder:
    """Writes and reads the files of one run. Creating it touches nothing; `claim` does."""

    def __init__(self, path: str | Path, *, private_records: bool = True) -> None:
        """`private_records`: only this user may read the files in `PRIVATE`; else the umask decides."""
        self.path = Path(path).expanduser()
        self.name = os.path.basename(os.path.abspath(self.path))  # `run.folder: .` has one, too
        self.checkpoints, self.logs = self.path / "checkpoints", self.path / "logs"
        self.scratch = self.path / "scratch"
        """For files that need not outlast the run."""
        self.listener: Callable[[Event], None] = lambda event: None
        """Called with each event of the run, by the thread on which it happens."""
        self._private, self._made, self._unsynced = private_records, time.time(), set[Path]()
        self._lock: int | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[Event] | None = None

    def claim(self) -> None:
        """Make the folder and lock it; a second run in it is refused."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            words = f"cannot be locked: {error.strerror}; choose a run.folder whose file system has locks"
            if isinstance(error, BlockingIOError):
                words = "is in use by another run; wait for it, or choose another run.folder"
            raise CheckpointError(f"{self.path} {words}") from error
        self.check_held()  # it may have been deleted between the two calls

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
        """Return whether there is anything to resume or to lose: a run that fails before its first step has nothing."""
        metrics = self.path / "metrics.jsonl"
        return any(self.checkpoints.glob("step-*")) or (metrics.exists() and metrics.stat().st_size > 0)

    def write_json(self, name: str, value: Any) -> None:
        """Write a small JSON file atomically: after a kill, the file is either the old one or the new one."""
        self.write_text(name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a small text file atomically."""
        target = self.path / name
        with self._to_write(target):
            partial = target.with_name(target.name + ".partial")
            partial.write_text(text, encoding="utf-8")
            fsync(partial)
            partial.replace(target)

    def check_held(self) -> None:
        """Raise `CheckpointError` if the folder at the path is no longer the one that this object has locked."""
        if self._lock is None:
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._lock), (self.path / ".lock").stat()):
                return
            words = "belongs to another run, which began in it when it was moved or deleted; choose another run.folder"
            raise CheckpointError(f"{self.path} {words}")
        words = "was moved or deleted while its run wrote to it; bring it back, and start the same command again"
        if self.path.is_dir():
            words = "lost its file .lock, without which a second run could begin in it; start the same command again"
        raise CheckpointError(f"{self.path} {words}")

    def remove(self, *names: str) -> None:
        """Remove folders of the run, if it still holds them."""
        with suppress(CheckpointError):
            self.check_held()
            for name in names:
                shutil.rmtree(self.path / name, ignore_errors=True)

    @contextmanager
    def _to_write(self, target: Path) -> Iterator[None]:
        """Make the folders between the run's own and a file that the body writes. The run's is never made anew.

        Raises `CheckpointError`; see `check_held`.
        """
        with disk_errors(target):
            self.check_held()
            folder = self.path
            if self._lock is None:
                folder.mkdir(parents=True, exist_ok=True)
            try:
                for part in target.parent.relative_to(folder).parts:
                    (folder := folder / part).mkdir(exist_ok=True)
                yield
                self._unsynced.add(target)
            except FileNotFoundError:  # the run's folder may have been moved since the check
                self.check_held()
                raise

    def read_json(self, name: str) -> Any:
        """Return the value in a JSON file; None: there is no such file."""
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
        with self._to_write(target):
            mode = 0o600 if self._private and name.startswith(PRIVATE) else 0o666
            with open(target, "a+b", buffering=0, opener=lambda path, flags: os.open(path, flags, mode)) as stream:
                end = stream.tell()
                if end and os.pread(stream.fileno(), 1, end - 1) != b"\n":
                    left = b"\n" + left  # a kill cut the last row
                try:
                    while left:
                        left = left[stream.write(left) :]
                except OSError:
                    stream.truncate(end)  # all rows or none, so that the file stays readable
                    raise

    def publish(self, name: str, event: Event) -> None:
        """Append the rows of an event to a file, and tell the listener."""
        self.append(name, event.rows)
        self.listener(event)

    def publish_later(self, name: str, make: Callable[[], Event]) -> None:
        """Make and append an event's rows on another thread. The next call or `settle` tells the listener or raises."""

        def write() -> Event:
            self.append(name, (event := make()).rows)
            return evolve(event, rows=event.rows[:SAMPLED_ROWS])

        self.settle()
        self._writer = self._writer or ThreadPoolExecutor(1, "whet rows")
        self._writing = self._writer.submit(write)

    def settle(self) -> None:
        """Wait until the rows of `publish_later` are written, and tell the listener."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self.listener(writing.result())

    def sync(self) -> None:
        """Make the rows that are written durable, as is needed before a checkpoint that builds on them."""
        written = [self._unsynced.pop() for _ in range(len(self._unsynced))]
        for path in {path for file in written for path in (file, *file.parents) if path.is_relative_to(self.path)}:
            if path.exists():
                with disk_errors(path):
                    fsync(path)

    def began(self) -> datetime:
        """Return when the first run attempt began, or when this object was made. Chat templates show this date."""
        first = next(self.events(), {})
        seconds = first.get("began", first.get("time", self._made))
        try:
            return datetime.fromtimestamp(seconds)
        except (TypeError, ValueError, OverflowError, OSError) as error:
            words = f"first line: the time {seconds!r:.60} is no time in seconds; chat templates may show its date"
            raise CheckpointError(f"{self.path / 'journal.jsonl'}, {words}") from error

    def events(self) -> Iterator[dict[str, Any]]:
        """Return the lines of the journal, the oldest first."""
        file = self.path / "journal.jsonl"
        return iter(read_rows(file) if file.exists() else ())

    def journal(self, event: str, **details: Any) -> None:
        """Write a line of what happened, and tell the listener."""
        self.append("journal.jsonl", [{"time": round(time.time(), 3), "event": event, **details}])
        self.listener(Event(event, details.get("step", details.get("after_step")), details=details))

    def rewind(self, step: int) -> None:
        """Delete rows and files of later steps, because these steps are taken again. The journal keeps its lines."""
        if (self.path / "journal.jsonl").exists():
            self._keep_rows("journal.jsonl", math.inf)
            self.journal("rewound", after_step=max(0, step))
        for name in STEPS:
            self._keep_rows(name, step)
        for folder in ("rollouts", "evaluations", "evaluations/tasks", "tables"):
            for file in self.path.glob(f"{folder}/step-*.json*"):
                if (step_of(file.name) or 0) > step and not file.is_dir():
                    file.unlink()
        for unfinished in self.checkpoints.glob("*.partial"):
            remove_folder(unfinished)

    def _keep_rows(self, name: str, step: float) -> None:
        file = self.path / name
        if not file.exists():
            return
        self.write_text(name, "".join(json_line(row) for row in read_rows(file) if _is_kept(row, step)))


def _is_kept(row: Mapping[str, Any], step: float) -> bool:
    number = row.get("step", 0)
    return step == math.inf or (isinstance(number, int) and number <= step)


@contextmanager
def closing_all(closers: list[Callable[[], None]]) -> Iterator[list[Callable[[], None]]]:
    """Call the functions in the list at the end, last first. Raises the error of the block, else of a closer."""
    first: BaseException | None = None
    try:
        yield closers
    except BaseException as error:
        first = error
    for close in reversed(closers):
        try:
            close()
        except BaseException as error:  # every other closer must still have its turn
            if first is None or isinstance(first, Exception) > isinstance(error, Exception):  # Ctrl-C meanwhile
                first = error
    if first is not None:
        raise first


@contextmanager
def temporary_run_folder(job: str) -> Iterator[RunFolder]:
    """Make a run folder for a job alone. After an error, the logs of its workers stay, because the error names them."""
    folder, keeps = RunFolder(tempfile.mkdtemp(prefix=f"whet-{job}-")), False
    watchdog().guard("folder", str(folder.path))
    try:
        folder.scratch.mkdir()
        yield folder
    except Exception:
        keeps = any(log.stat().st_size for log in folder.logs.rglob("*.log"))
        raise
    finally:
        shutil.rmtree(folder.scratch if keeps else folder.path, ignore_errors=True)
        watchdog().release("folder", str(folder.path))
