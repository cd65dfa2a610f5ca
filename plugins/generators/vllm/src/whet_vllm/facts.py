"""The facts of the generator for planning. Imports no engine."""

from attrs import evolve

from whet.component import GeneratorFacts
from whet.data.model_info import ModelInfo
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig


def facts(config: VllmConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the transports of weights, the memory of weights and cache, and the adapters that the engine applies.

    On a CPU, vLLM cannot apply any adapter to a mixture of experts.
    """
    found = ENGINE.facts(config, model, imports=("whet_vllm.worker", "vllm.v1.engine.async_llm"))
    text = model.config.get("text_config") or model.config
    dense = not any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    adapters = frozenset({"linear"}) if dense else frozenset[str]()
    return evolve(found, adapters=adapters, extras=frozenset({"progress", "likeliest", "schema"}))
