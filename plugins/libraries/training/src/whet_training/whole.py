"""A folder that a command writes: it is there when it is whole, and one process writes it."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whet.data.files import disk_errors
from whet.errors import WhetError

PARTIAL = ".partial"
"""The folder in which a command writes, within an empty folder; else the end of its name, beside the new one."""


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Make a folder to write into, and move it to `out` after the body. After an error nothing is left.

    Raises `WhetError` if `out` holds anything, before or after the body, or if another process writes it.
    """
    refuse_used(out)
    there = out.is_dir()  # it may be a link, or a mount, which cannot be replaced
    partial = out / PARTIAL if there else out.with_name(f"{out.name}{PARTIAL}")
    with _locked(partial, out):
        try:
            with disk_errors(partial):
                for left in partial.iterdir():  # by a process that was killed
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield partial
            refuse_used(out)
            with disk_errors(out):
                for file in sorted(partial.iterdir()) if there else ():
                    file.rename(out / file.name)
                partial.rmdir() if there else partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def refuse_used(out: Path) -> None:
    """Raise `WhetError` if a path is neither new nor an empty folder. What a killed process left does not count."""
    held = sorted(file.name for file in out.iterdir() if file.name != PARTIAL) if out.is_dir() else []
    if held or (out.exists() and not out.is_dir()):
        holds = f": it holds {', '.join(held[:3])}{', ...' * (len(held) > 3)}" if held else ""
        raise WhetError(f"{out} is no empty folder{holds}; wanted a new or an empty one: choose another folder")


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Make a folder and hold its lock, which a process loses when it ends."""
    with disk_errors(out):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), folder.stat()):
                raise BlockingIOError  # the process that had it made way for a third
        except OSError as error:
            words = f"cannot be locked: {error.strerror}; choose a folder whose file system has locks"
            if isinstance(error, BlockingIOError | FileNotFoundError):
                words = "is being written by another process; wait for it, or choose another folder"
            raise WhetError(f"{out} {words}") from error
        yield
    finally:
        os.close(lock)
