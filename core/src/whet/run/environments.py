"""Builds the environments of a config, and says which one could not be built, whatever its code raised."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from whet.config.build import build_selection
from whet.errors import ConfigError, PluginError, WhetError, in_words
from whet.rollout.routing import Route

if TYPE_CHECKING:
    from whet.config.sections import EnvironmentSection


def build_route(entry: "EnvironmentSection", split: str, *roles: Any) -> Route:
    """Build an environment, with the scorers of the roles that it asks for where it does."""
    name = entry.name or entry.component.name
    with _environment_errors(name, split):
        environment = build_selection(entry.component, *roles)
        route = Route(name, environment, split, entry.weight, samples=entry.samples, limit=entry.limit)
        try:
            route.tasks()
        except BaseException:
            environment.close()
            raise
    return route


@contextmanager
def _environment_errors(name: str, split: str) -> Iterator[None]:
    """Say which environment could not be built, whatever its code raised."""
    try:
        yield
    except WhetError as error:
        raise ConfigError(f"environment {name!r}, split {split!r}: {error}") from error
    except Exception as error:  # an environment's own code
        raise PluginError(f"environment {name!r} cannot be built: {in_words(error)}") from error
