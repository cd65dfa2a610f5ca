"""Checkpoints. A checkpoint is complete or absent, and only the run that wrote it loads it.

A checkpoint is written to a temporary folder, listed with the size and checksum of each file, synced to disk, and then
renamed. After a kill at any moment there is either a whole checkpoint of the step or none.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.config.messages import choice_words
from whet.data.files import disk_errors, fsync, remove_folder
from whet.errors import CheckpointError, WhetError, in_words
from whet.run.run_folder import RunFolder

if TYPE_CHECKING:
    from whet.config.sections import KeepBestSection

MANIFEST, STATE, PARTIAL = "complete.json", "state.json", ".partial"
_NUMBER = re.compile("[0-9]{6,15}")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The errors of reading a JSON file and of looking up its values."""
Save = Callable[[Path], "Callable[[], object] | None"]
"""Saves a model into a folder. After it returns, the model may change. It returns a function that waits until the files
are durable, or None if they are durable already."""


@frozen
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """The driver's state as builtins."""

    def part(self, name: str) -> Path:
        """Return the folder that a role saved: `backend` or `roles/NAME`."""
        return self.folder / name


def begin(run: RunFolder, step: int, state: Mapping[str, Any], saves: Mapping[str, Save]) -> Callable[[], Path]:
    """Start a checkpoint, saved by a function for each subfolder. Return what completes it, on any thread."""
    final = run.checkpoints / f"step-{step:06d}"
    partial = final.with_name(final.name + PARTIAL)
    text = json.dumps({"step": step, **state})
    run.check_held()
    with disk_errors(partial):
        remove_folder(partial)
        for name in saves:
            (partial / name).mkdir(parents=True)

    def complete() -> Path:
        with removed(run, partial):
            for wait in waits:
                wait()
        run.check_held()
        with disk_errors(partial):
            (partial / STATE).write_text(text, encoding="utf-8")
            files = sorted(p for p in partial.rglob("*") if p.is_file())
            listed = {str(p.relative_to(partial)): [p.stat().st_size, _checksum(p)] for p in files}
            (partial / MANIFEST).write_text(json.dumps({"step": step, "files": listed}, indent=1), encoding="utf-8")
            folders = [p for p in partial.rglob("*") if p.is_dir()]
            for path in [*files, partial / MANIFEST, *folders, partial]:
                fsync(path)
            run.check_held()
            remove_folder(final)
            partial.rename(final)
            fsync(run.checkpoints)
        return final

    with removed(run, partial):
        started = [save(partial / name) for name, save in saves.items()]
    waits = [wait for wait in started if callable(wait)]
    return complete


@contextmanager
def removed(run: RunFolder, partial: Path) -> Iterator[None]:
    """Remove what the body writes if it fails: these files may be what fills the disk."""
    try:
        yield
    except WhetError:
        run.remove(str(partial.relative_to(run.path)))
        raise


def prune(run: RunFolder, keep: int, best: "KeepBestSection | None" = None, before: int = 0) -> None:
    """Delete all but the newest `keep` checkpoints and the best; a `keep` of 0 keeps all.

    If no checkpoint has the metric, its name may be a mistake. Then the checkpoints up to the step `before` stay.
    """
    if keep:
        run.check_held()
        found, ranked = folders(run), ranking(run, best) if best else []
        kept = {step for step, _ in found[:keep]} | {*(ranked[: best.count] if best else ())}
        spared = before if best and not ranked else 0
        for folder in [folder for step, folder in found if step not in kept and step > spared]:
            partial = folder.with_name(folder.name + PARTIAL)  # a half-deleted one must not look damaged
            with suppress(OSError):
                folder.rename(partial)
            remove_folder(partial)


def ranking(run: RunFolder, best: "KeepBestSection") -> list[int]:
    """Return the steps of the checkpoints that have the metric, the best first. Their files are not checked."""
    sign, found = (1 if best.smallest else -1), list[tuple[float, int]]()
    for step, folder in folders(run):
        with suppress(*_UNREADABLE):
            value = json.loads((folder / STATE).read_text(encoding="utf-8"))["metrics"][best.metric]
            if math.isfinite(value):
                found.append((sign * value, step))
    return [step for _, step in sorted(found)]


def missing(best: "KeepBestSection", metrics: Mapping[str, float]) -> str:
    """Return a warning if a saved step lacks the metric. Empty: the step has it, or the step was not evaluated."""
    family = best.metric.partition("/")[0] + "/"
    evaluated = family not in ("evaluation/", "validation/") or any(name.startswith(family) for name in metrics)
    if best.metric in metrics or not evaluated:
        return ""
    near = [name for name in metrics if name.startswith(family)] or metrics
    return f"run.keep_best keeps nothing: there is no metric {best.metric!r}{choice_words(best.metric, near)}"


def newest(run: RunFolder) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none. The checkpoint is not read.

    A folder without a list of files is none. `latest` reports it.
    """
    return max((step for step, folder in folders(run) if (folder / MANIFEST).is_file()), default=0)


def position(run: RunFolder, step: int) -> dict[str, int]:
    """Return the position in the data of a step's checkpoint; empty: there is none. The files are not checked."""
    for number, folder in folders(run):
        with suppress(*_UNREADABLE):
            if number == step:
                found = json.loads((folder / STATE).read_text(encoding="utf-8")).get("data", {}).items()
                return {name: count for name, count in found if isinstance(count, int)}
    return {}


def latest(run: RunFolder) -> Checkpoint | None:
    """Return the newest checkpoint; None: there is none. Raises `CheckpointError` if it is damaged."""
    found = folders(run)
    return read(found[0][1]) if found else None


def read(folder: Path) -> Checkpoint:
    """Return a checkpoint after a check of every file. Raises `CheckpointError` that describes the damage."""
    there = [one.name for one in folder.parent.glob("step-*") if _NUMBER.fullmatch(one.name[5:])]
    advice = "delete the folder to resume from the checkpoint before it"
    if folder.name == min(there, key=lambda name: (len(name), name), default=""):
        advice = "no checkpoint is before it: bring it back from a copy, or choose another run.folder to begin anew"
    damaged = f"checkpoint {folder} is damaged:"
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{damaged} it lacks {MANIFEST}, which lists its files; {advice}")
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, checksum) in listed["files"].items():
            file = (folder / name).resolve()
            if not file.is_relative_to(folder.resolve()) or not file.is_file():
                raise CheckpointError(f"{damaged} it lacks {name!r}, which its {MANIFEST} lists; {advice}")
            if file.stat().st_size != size or _checksum(file) != checksum:
                raise CheckpointError(f"{damaged} {name} is not what was written; {advice}")
        if STATE not in listed["files"]:
            raise CheckpointError(f"{damaged} its {MANIFEST} does not list {STATE}; {advice}")
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        steps = {int(folder.name[5:]), int(listed["step"]), int(state["step"])}
        position = state.get("data", {})
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {in_words(error)}; {advice}") from error
    counts = position.values() if isinstance(position, dict) else [position]
    if not all(isinstance(count, int) for count in counts) or (counts and "records" not in position):
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: `data` of {STATE} is {position!r:.100}, wanted numbers by name, "
            f"`records` among them; {advice}"
        )
    if len(steps) > 1:
        found = " and ".join(map(str, sorted(steps)))
        raise CheckpointError(
            f"checkpoint {folder} was moved: folder, {MANIFEST} and {STATE} name the steps {found}; give each folder "
            "its own name again, or delete it"
        )
    return Checkpoint(folder, steps.pop(), state)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """Return the differences of two run fingerprints, one line each, without the keys that may change."""
    before, now = _flat(saved), _flat(current)
    lines = []
    for path in sorted(before.keys() | now.keys()):
        if any(path == a or path.startswith(a + ".") for a in allowed):
            continue
        if before.get(path) != now.get(path):
            old, new = (repr(d[path]) if path in d else "nothing" for d in (before, now))
            lines.append(f"{path}: the run has {old}, the config gives {new}")
    return lines


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else key).items()}
    if isinstance(value, list) and value:
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}.{i}").items()}
    return {path: value}


def folders(run: RunFolder) -> list[tuple[int, Path]]:
    """Return the checkpoint folders, the newest first. A save that was cut short has another name."""
    found = [p for p in run.checkpoints.glob("step-*") if _NUMBER.fullmatch(p.name[5:])]
    return sorted(((int(p.name[5:]), p) for p in found), reverse=True)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
