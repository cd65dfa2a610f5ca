"""The option `--config` of commands that look at plugins: it adds the single-file plugins of a config."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from whet.plan.load import load_files_of
from whet.plugins.catalog import catalog
from whet.plugins.registry import Registry, load_plugins

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def registry_option(function: Decorated) -> Decorated:
    """Add `--config`, the argument of `load_registry`."""
    about = "Also see the single-file plugins that this config names."
    return click.option("--config", type=click.Path(), help=about)(function)


def load_registry(config: str | None) -> Registry:
    """Load the installed plugins, and the single files that a config names. Problems of these files are warnings."""
    registry = load_plugins()
    for problem in load_files_of(config, registry) if config else []:
        click.echo(f"warning: {problem}", err=True)
    return registry


def elsewhere(registry: Registry, name: str) -> Iterator[tuple[str, str]]:
    """Yield KIND/NAME and distribution of everything that a name may mean in the catalog and that is not installed."""
    for kind, owners in catalog().components.items():
        for component, owner in owners.items():
            if name in (component, f"{kind}/{component}", owner) and owner not in registry.here:
                yield f"{kind}/{component}", owner
