"""The hook of this plugin: the logger `wandb`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_wandb.config import WandbConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `wandb`."""
    return [Component("wandb", WandbConfig, "whet_wandb.logger:WandbLogger")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return a problem for a second logger `wandb`: both would write one run of W&B."""
    found = [i for i, selection in enumerate(config.loggers) if isinstance(selection.config, WandbConfig)]
    return [Problem(f"loggers.{i}", "another logger `wandb` writes the same run; remove one") for i in found[1:]]
