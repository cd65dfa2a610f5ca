"""What this plugin offers: endpoints."""

from collections.abc import Iterable

from whet import hookimpl


@hookimpl
def whet_endpoints() -> Iterable[str]:
    """Offer endpoints that speak OpenAI's API."""
    return ["whet_endpoint.endpoints:OpenAIEndpoints"]
