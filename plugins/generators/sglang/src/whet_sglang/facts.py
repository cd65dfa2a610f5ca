"""The facts of the generator for planning. Imports no engine."""

from whet.component import GeneratorFacts
from whet.data.model_info import ModelInfo
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig


def facts(config: SglangConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the transports of weights, and the memory of weights and cache."""
    return ENGINE.facts(config, model, imports=("whet_sglang.worker",))
