"""Checkpoints: complete or not there, and only ever picked by the run that wrote them.

A checkpoint is written beside its place, listed file by file with sizes and checksums, made durable, and
then renamed. A kill at any moment leaves either no checkpoint of that step or a whole one.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from whet.errors import CheckpointError, WhetError
from whet.run_folder import RunFolder, disk_errors

MANIFEST = "complete.json"


@frozen
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """What the driver carries: builtins."""

    def part(self, name: str) -> Path:
        """Give what a role saved: `backend`, or `roles/NAME`."""
        return self.folder / name


def write(run: RunFolder, step: int, state: Mapping[str, Any], saves: Mapping[str, Callable[[Path], None]]) -> Path:
    """Write a checkpoint of a step. `saves`, by name of the subfolder, each return when what they wrote is durable."""
    final = run.checkpoints / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    with disk_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        for name in saves:
            (partial / name).mkdir(parents=True)
    try:
        for name, save in saves.items():
            save(partial / name)
    except WhetError:
        shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
        raise
    with disk_errors(partial):
        (partial / "state.json").write_text(json.dumps({"step": step, **state}), encoding="utf-8")
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        listed = {str(p.relative_to(partial)): [p.stat().st_size, _checksum(p)] for p in files}
        (partial / MANIFEST).write_text(json.dumps({"step": step, "files": listed}, indent=1), encoding="utf-8")
        folders = [p for p in partial.rglob("*") if p.is_dir()]
        for path in [*files, partial / MANIFEST, *folders, partial]:
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _fsync(run.checkpoints)
    return final


def prune(run: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; 0 keeps all."""
    if keep:
        for _, folder in _folders(run)[keep:]:
            shutil.rmtree(folder, ignore_errors=True)


def newest(run: RunFolder) -> int:
    """Give the step of the newest complete checkpoint, which is not read; 0 where there is none."""
    return max((step for step, _ in _folders(run)), default=0)


def latest(run: RunFolder, step: int | None = None) -> Checkpoint | None:
    """Find the newest complete checkpoint, or that of a step. A damaged one raises `CheckpointError`."""
    for number, folder in _folders(run):
        if step is None or number == step:
            return read(folder)
    if step is not None:
        have = ", ".join(str(n) for n, _ in _folders(run)) or "none"
        raise CheckpointError(f"{run.path} has no checkpoint of step {step}; it has {have}")
    return None


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint and check every file against the manifest."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, checksum) in listed["files"].items():
            file = (folder / name).resolve()
            if not file.is_relative_to(folder.resolve()) or not file.is_file():
                raise CheckpointError(f"checkpoint {folder} lacks {name!r}, which its {MANIFEST} lists")
            if file.stat().st_size != size or _checksum(file) != checksum:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} is not what was written; delete the folder to resume "
                    f"from the checkpoint before it"
                )
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(folder, int(state["step"]), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: {error}; delete it to resume from an older"
        ) from error


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], allowed: list[str]) -> list[str]:
    """List where two run identities differ, a line each, leaving out what may change."""
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


def _folders(run: RunFolder) -> list[tuple[int, Path]]:
    found = [p for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit() and (p / MANIFEST).exists()]
    return sorted(((int(p.name[5:]), p) for p in found), reverse=True)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
