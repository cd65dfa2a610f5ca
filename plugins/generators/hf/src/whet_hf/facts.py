"""What planning may know of the generator, found without torch."""

from whet.component import Facts
from whet.model import ModelInfo
from whet_hf.config import HfConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def facts(config: HfConfig, model: ModelInfo) -> Facts:
    """Say how weights can come in, and how much memory weights and cache take at most."""
    dtype = model.dtype if config.dtype == "model" else config.dtype
    weights = model.parameters * DTYPE_BYTES[dtype]
    return Facts(
        transports=("shared", "shared-memory", "disk"),
        memory_bytes=weights + int(config.cache_gib * 2**30) if weights else None,
    )
