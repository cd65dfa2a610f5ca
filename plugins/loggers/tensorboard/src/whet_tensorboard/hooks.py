"""The hooks of this plugin: the logger `tensorboard`, and a check that two loggers use different folders."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_tensorboard.config import TensorboardConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `tensorboard`."""
    return [Component("tensorboard", TensorboardConfig, "whet_tensorboard.logger:TensorboardLogger")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return a problem for each logger whose folder another one writes: TensorBoard would show every number twice."""
    problems, taken = [], set[PurePath]()
    for i, selection in enumerate(config.loggers):
        if not isinstance(selection.config, TensorboardConfig):
            continue
        folder = PurePath(selection.config.folder)
        if folder in taken:
            found = f"{selection.config.folder!r} is already written by another logger; choose another folder"
            problems.append(Problem(f"loggers.{i}.folder", found))
        taken.add(folder)
    return problems
