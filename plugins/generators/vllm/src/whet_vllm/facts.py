"""The facts of the generator for planning. Imports no engine."""

from whet.component import GeneratorFacts
from whet.data.model_info import ModelInfo
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig


def facts(config: VllmConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the transports of weights, and the memory of weights and cache."""
    return ENGINE.facts(config, model, imports=("whet_vllm.worker", "vllm.v1.engine.async_llm"))
