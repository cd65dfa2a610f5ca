"""What this plugin offers."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_generators() -> Iterable[Component]:
    """Offer the generator that runs vLLM's engine."""
    return [Component("vllm", VllmConfig, "whet_vllm.generator:VllmGenerator", facts="whet_vllm.facts:facts")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Look for the engine, and for arguments that it does not have."""
    from whet_vllm.arguments import INSTALL, installed_arguments, is_installed, problems

    chosen = config.generator.config if config.generator is not None else None
    if not isinstance(chosen, VllmConfig):
        return []
    found = list(problems(chosen, installed_arguments()))
    if not is_installed() and not _elsewhere(config):
        found.append(Problem("generator", f"`vllm` needs vLLM, which this interpreter does not have: {INSTALL}"))
    if chosen.tensor_parallel > 1 and config.cluster.gpus.get("generator"):
        message = f"is {chosen.tensor_parallel}, and a rank has one GPU; wanted 1, with a replica for each GPU"
        found.append(Problem("generator.tensor_parallel", message))
    return found


def _elsewhere(config: "Config") -> bool:
    """Whether the generator's workers run on another interpreter, or on other machines, which may have the engine."""
    return "generator" in (getattr(config.cluster, "python", None) or {}) or bool(config.cluster.address)
