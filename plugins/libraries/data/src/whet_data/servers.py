"""Foreign servers that play episodes: the keys of a config that name them."""

import os
from typing import Any
from urllib.parse import urlsplit

from whet.errors import ConfigError


def server_address(instance: object, attribute: Any, value: str) -> None:
    """Refuse what is no address of a server. A validator."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"is {value!r}, wanted the address of a server, e.g. http://127.0.0.1:8000")


def token_in(variable: str, key: str) -> str:
    """Return the token in an environment variable. Empty: the config names no variable.

    Raises `ConfigError` if the variable is not set, with the config's `key`.
    """
    token = os.environ.get(variable, "") if variable else ""
    if variable and not token:
        raise ConfigError(f"{key}: {variable} is not set, or empty; set it")
    return token
