"""Checks of the endpoint of a run."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.component import Problem

if TYPE_CHECKING:
    from whet.config.sections import Config

SERVER = "aiohttp"
"""The package that serves the endpoint."""


def endpoint_problems(config: "Config") -> Iterator[Problem]:
    """Find reasons why the endpoint cannot be served: no generator, or the server's package is not installed."""
    if not config.endpoint.serve:
        return
    if config.generator is None:
        yield Problem("endpoint.serve", "needs a generator; choose one by `use:`")
    if importlib.util.find_spec(SERVER) is None:
        yield Problem("endpoint.serve", f"needs {SERVER}, which is not installed here: pip install 'whet[endpoint]'")
