"""The hook of this plugin: the logger `trackio`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_trackio.config import TrackioConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `trackio`."""
    return [Component("trackio", TrackioConfig, "whet_trackio.logger:TrackioLogger")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return a problem for a second logger `trackio`: both would write one run of Trackio."""
    found = [i for i, selection in enumerate(config.loggers) if isinstance(selection.config, TrackioConfig)]
    return [Problem(f"loggers.{i}", "another logger `trackio` writes the same run; remove one") for i in found[1:]]
