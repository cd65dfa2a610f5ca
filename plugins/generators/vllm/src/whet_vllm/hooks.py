"""The hooks of this plugin."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator `vllm`, which runs vLLM's engine."""
    return [Component("vllm", VllmConfig, "whet_vllm.generator:VllmGenerator", facts="whet_vllm.facts:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return problems: arguments that the engine does not have, and more GPUs than a rank can have."""
    from whet_vllm.arguments import ENGINE

    return ENGINE.problems(config, VllmConfig)
