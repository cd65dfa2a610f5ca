"""The hooks of this plugin: the environment `calculator`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_tools.config import CalculatorConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environment `calculator`."""
    target = "whet_env_tools.calculator:Calculator"
    return [Component("calculator", CalculatorConfig, target, "whet_env_tools.config:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each `calculator` section whose `largest` is below `smallest`."""
    for path, sections in (
        ("environments", config.environments),
        ("evaluation.environments", config.evaluation.environments),
    ):
        for i, section in enumerate(sections):
            found = section.component.config
            if isinstance(found, CalculatorConfig) and found.largest < found.smallest:
                yield Problem(f"{path}[{i}].largest", f"is {found.largest}, wanted at least smallest, {found.smallest}")
