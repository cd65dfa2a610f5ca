"""What planning may know of the generator, found without the engine."""

from whet.component import Facts
from whet.data.model_info import ModelInfo
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig


def facts(config: VllmConfig, model: ModelInfo) -> Facts:
    """Say how weights can come in, and how much memory weights and cache take."""
    return ENGINE.facts(config, model, imports=("whet_vllm.worker", "vllm.v1.engine.async_llm"))
