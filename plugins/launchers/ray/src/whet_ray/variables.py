"""Environment variables that are set only while Ray starts. Ray and its processes read many options nowhere else."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, and restore them afterwards. None removes a variable."""
    before = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        set_variables(before)


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set environment variables. None removes a variable."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
