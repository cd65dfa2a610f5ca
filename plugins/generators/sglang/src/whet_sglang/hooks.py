"""The hooks of this plugin."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_sglang.config import SglangConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator `sglang`, which runs SGLang's engine."""
    return [Component("sglang", SglangConfig, "whet_sglang.generator:SglangGenerator", facts="whet_sglang.facts:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return problems: arguments that the engine does not have, and more GPUs than a rank can have."""
    from whet_sglang.arguments import ENGINE

    return ENGINE.problems(config, SglangConfig)
