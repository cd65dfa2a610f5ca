"""Closers of what a run has opened, called in reverse order whatever one of them raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def closing_all(closers: list[Callable[[], None]]) -> Iterator[list[Callable[[], None]]]:
    """Call what is in the list at the end, last first. The error inside comes through, else the first of a closer."""
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
