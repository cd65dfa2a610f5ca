"""A folder that a command writes: it is there when it is whole, and one process writes it.

A command writes into a partial folder, which holds a file `MARK`: the lock of the command. The mark says "unfinished"
until the body has succeeded. Only what lies beside that word is ever deleted.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whet.data.files import disk_errors
from whet.errors import WhetError

PARTIAL = ".partial"
"""The folder in which a command writes, within an empty folder; else the end of its name, beside the new one."""
MARK = ".whet-partial"


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Make a folder to write into, and move what it holds to `out` after the body. If the body fails, nothing is left.

    Raises `WhetError` if `refuse_used` does, or if another process writes `out`; and after the body if `out` cannot be
    made: what was written stays in the partial folder, which the error names.
    """
    refuse_used(out)
    there = out.is_dir()  # it may be a link, or a mount, which cannot be replaced
    partial = _partial(out)
    mark = partial / MARK
    with _locked(partial, out):
        refuse_used(out)  # the process that had the lock may have finished
        try:
            with disk_errors(partial):
                mark.write_text("unfinished")
                _empty(partial)  # of what a killed command left
            yield partial
        except BaseException:
            with suppress(OSError):
                _empty(partial)
                mark.unlink()
            raise
        try:
            with disk_errors(out):
                os.truncate(mark, 0)
                _refuse_held(out)
                for file in sorted(partial.iterdir()) if there else ():
                    if file != mark:
                        file.rename(out / file.name)
                if not there:
                    partial.rename(out)
                (mark if there else out / MARK).unlink()
        except WhetError as error:
            raise WhetError(f"{error}; what was written is kept in {partial}: move it from there") from error


def refuse_used(out: Path) -> None:
    """Raise `WhetError` if a path is neither new nor an empty folder, or if its partial folder is no command's.

    What a killed command left does not count.
    """
    _refuse_held(out)
    if not _free(partial := _partial(out)):
        raise WhetError(
            f"{out} is written in {partial} first, and what is there was not left by an unfinished command; "
            "move it or delete it, or choose another folder"
        )


def _free(partial: Path) -> bool:
    """Return whether a command may write at a path and delete what is there."""
    if partial.is_symlink() or not partial.is_dir():
        return not os.path.lexists(partial)
    with disk_errors(partial):
        names = os.listdir(partial)
        return set(names) <= {MARK} or (MARK in names and (partial / MARK).stat().st_size > 0)


def _partial(out: Path) -> Path:
    return out / PARTIAL if out.is_dir() else out.with_name(f"{out.name}{PARTIAL}")


def _refuse_held(out: Path) -> None:
    held = sorted(file.name for file in out.iterdir() if file.name != PARTIAL) if out.is_dir() else []
    if held or (os.path.lexists(out) and not out.is_dir()):
        holds = f": it holds {', '.join(held[:3])}{', ...' * (len(held) > 3)}" if held else ""
        raise WhetError(f"{out} is no empty folder{holds}; wanted a new or an empty one: choose another folder")


def _empty(partial: Path) -> None:
    for left in partial.iterdir():
        if left.name != MARK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


@contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    """Make a folder with its mark, and hold the mark's lock, which a process loses when it ends."""
    with disk_errors(out):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial / MARK, os.O_RDWR | os.O_CREAT, 0o644)  # NFS locks files for all machines, folders not
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), (partial / MARK).stat()):
                raise BlockingIOError  # the process that had it made way for a third
        except OSError as error:
            words = f"cannot be locked: {error.strerror}; choose a folder whose file system has locks"
            if isinstance(error, BlockingIOError | FileNotFoundError):
                words = "is being written by another process; wait for it, or choose another folder"
            raise WhetError(f"{out} {words}") from error
        yield
    finally:
        os.close(lock)
        with suppress(OSError):
            partial.rmdir()  # if it is empty; NFS keeps a deleted file there until it is closed
