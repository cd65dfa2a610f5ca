"""What an endpoint of a run stands on."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whet.component import Problem

if TYPE_CHECKING:
    from whet.config.sections import Config

SERVER = "aiohttp"
"""The package that it is served with."""


def endpoint_problems(config: "Config") -> Iterator[Problem]:
    """Find out whether there is something to serve, and something to serve it with."""
    if not config.endpoint.serve:
        return
    if config.generator is None:
        yield Problem("endpoint.serve", "needs a generator; choose one by `use:`")
    if importlib.util.find_spec(SERVER) is None:
        yield Problem("endpoint.serve", f"needs {SERVER}, which is not installed here: pip install 'whet[endpoint]'")
