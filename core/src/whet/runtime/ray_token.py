"""Ray's token, which Ray takes from the environment or a file: never left where programs of the driver inherit it.

    before Ray is used   RAY_AUTH_TOKEN is taken out of the environment, and kept here
    while Ray starts     the environment names a file that the user alone can read, and no token
    from then on         Ray has the token in memory, and its own processes know the file, which ends with the session

A token is kept as long as the process lives, as Ray itself does: it never reads another one.
"""

import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

TOKEN: Final = "RAY_AUTH_TOKEN"
FILE: Final = "RAY_AUTH_TOKEN_PATH"
MODE: Final = "RAY_AUTH_MODE"

_lock: Final = threading.Lock()
_kept: Final[dict[str, str]] = {}
"""What is shown to Ray: the token of this process, and the mode where we made the token. Empty: it has none of its own,
and Ray looks for one where it does by default."""


def hide_token() -> None:
    """Take the token out of this process's environment."""
    with _lock:
        if token := os.environ.pop(TOKEN, ""):
            _kept[TOKEN] = token


def make_token() -> None:
    """Make a token for a Ray of our own, unless the user has chosen how to reach Ray, or Ray has chosen already."""
    with _lock:
        if not _kept and not {MODE, FILE} & set(os.environ) and "ray" not in sys.modules:
            # By default it would write a token to the home folder, and say so on every start.
            _kept.update({TOKEN: secrets.token_hex(32), MODE: "token"})


@contextmanager
def shown_token(folder: Path) -> Iterator[None]:
    """Show Ray a file in a private folder with the token, while it starts or connects."""
    with _lock:
        shown = dict(_kept)
    if not shown:
        yield
        return
    file = folder / "token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        stream.write(shown.pop(TOKEN))
    shown[FILE] = str(file)
    before = {name: os.environ.get(name) for name in shown}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
