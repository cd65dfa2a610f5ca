"""What planning may know of the generator, found without torch."""

from whet.component import Facts
from whet.model import ModelInfo
from whet_hf.config import HfConfig


def facts(config: HfConfig, model: ModelInfo) -> Facts:
    """Say how weights can come in, and how much memory weights and cache take at most."""
    weights = model.weight_bytes(config.dtype)
    cache = int(config.cache_gib * 2**30)
    if model.max_positions and model.token_cache_bytes:
        cache = min(cache, config.max_batch * model.max_positions * model.token_cache_bytes)
    return Facts(
        transports=("shared", "broadcast", "shared-memory", "tcp", "disk"),
        running=("drain", "keep", "abort"),
        dtype=model.dtype_for(config.dtype),
        memory_bytes=weights + cache if weights else None,
        imports=("whet_hf.worker", *model.code),
        forkable=True,
        sleeps=("cpu", "cuda"),
    )
