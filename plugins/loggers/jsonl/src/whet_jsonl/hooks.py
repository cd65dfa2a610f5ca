"""The hooks of this plugin: the logger `jsonl`, and a check that no other part of the run writes its file."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_jsonl.config import STANDARD_OUTPUT, JsonlConfig

if TYPE_CHECKING:
    from whet.config.sections import Config

RECORDS = ("metrics.jsonl", "histograms.jsonl", "spans.jsonl", "journal.jsonl")
"""Files in the run folder that core writes."""


@hookimpl
def whet_loggers() -> Iterable[Component]:
    """Offer the logger `jsonl`."""
    return [Component("jsonl", JsonlConfig, "whet_jsonl.logger:JsonlLogger")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return a problem for each path that core or another `jsonl` logger writes, too."""
    problems, taken = [], set(map(PurePath, RECORDS))
    for i, selection in enumerate(config.loggers):
        if not isinstance(selection.config, JsonlConfig) or selection.config.path == STANDARD_OUTPUT:
            continue
        path = PurePath(selection.config.path)
        if path in taken:
            found = f"{selection.config.path!r} is already written by the run; choose another file"
            problems.append(Problem(f"loggers[{i}].path", found))
        taken.add(path)
    return problems
