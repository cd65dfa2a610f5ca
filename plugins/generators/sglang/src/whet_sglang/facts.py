"""What planning may know of the generator, found without the engine."""

from whet.component import Facts
from whet.model import ModelInfo
from whet_sglang.arguments import CPU_CACHE_GIB, DTYPE_BYTES, INSTALL, is_installed
from whet_sglang.config import SglangConfig


def facts(config: SglangConfig, model: ModelInfo) -> Facts:
    """Say how weights can come in, and how much memory weights and cache take."""
    dtype = model.dtype if config.dtype == "model" else config.dtype
    weights = model.parameters * DTYPE_BYTES[dtype]
    cache = int((config.cache_gib or CPU_CACHE_GIB) * 2**30)
    return Facts(
        transports=("shared-memory", "tcp", "disk"),
        running=("drain", "keep", "abort"),
        dtype=str(config.engine.get("quantization") or dtype),
        memory_bytes=weights + cache if weights else None,
        imports=("whet_sglang.worker",),
        notes=()
        if is_installed()
        else (f"This interpreter has no SGLang; that of the generator needs it: {INSTALL}.",),
    )
