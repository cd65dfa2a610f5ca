"""What planning may know of the generator, found without the engine."""

from whet.component import Facts
from whet.data.model_info import ModelInfo
from whet_sglang.arguments import ENGINE
from whet_sglang.config import SglangConfig


def facts(config: SglangConfig, model: ModelInfo) -> Facts:
    """Say how weights can come in, and how much memory weights and cache take."""
    return ENGINE.facts(config, model, imports=("whet_sglang.worker",))
