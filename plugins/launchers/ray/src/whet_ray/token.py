"""Ray's authentication token. Ray reads it from the environment or from a file.

The token never stays in the environment, because every program that the driver starts inherits the environment.

    before Ray is used   whet removes RAY_AUTH_TOKEN from the environment and keeps it in this module
    while Ray starts     the environment names a file with the token, which only the user can read
    afterwards           Ray has the token in memory; Ray's processes know the file, which is removed with the session

This module keeps the token until the process ends. Ray does the same: it reads a token once per process.
"""

import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from whet_ray.variables import environment

TOKEN: Final = "RAY_AUTH_TOKEN"
FILE: Final = "RAY_AUTH_TOKEN_PATH"
MODE: Final = "RAY_AUTH_MODE"

_lock: Final = threading.Lock()
_kept: Final[dict[str, str]] = {}
"""Variables that Ray is to see: the token of this process, and the mode where whet made the token.

Where it is empty, Ray looks for a token in its default places.
"""


def hide_token() -> None:
    """Remove the token from this process's environment, and keep it in this module."""
    with _lock:
        if token := os.environ.pop(TOKEN, ""):
            _kept[TOKEN] = token


def make_token() -> None:
    """Make a token for a Ray that whet starts.

    Make none where there is a token already, where the user has set the mode or the token file, or where Ray has been
    imported and so has read its settings.
    """
    with _lock:
        if not _kept and not {MODE, FILE} & set(os.environ) and "ray" not in sys.modules:
            # Without a token, Ray would write one to the home folder and print that at every start.
            _kept.update({TOKEN: secrets.token_hex(32), MODE: "token"})


@contextmanager
def shown_token(folder: Path) -> Iterator[None]:
    """Write the token to a file in a private folder, and name the file in the environment while Ray starts or joins."""
    with _lock:
        shown = dict(_kept)
    if not shown:
        yield
        return
    file = folder / "token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(shown.pop(TOKEN))
    shown[FILE] = str(file)
    with environment(shown):
        yield
