"""The facts of the generator for planning. Imports no torch."""

from collections.abc import Iterator
from functools import partial

from whet.component import GeneratorFacts, MemoryTerm
from whet.data.model_info import ModelInfo
from whet_generation.routed_experts import routed_experts
from whet_hf.config import HfConfig


def facts(config: HfConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the transports of weights, and the most memory that weights and cache need."""
    return GeneratorFacts(
        transports=("shared", "broadcast", "shared-memory", "disk"),
        on_weight_update=("drain", "continue", "abort"),
        dtype=model.dtype_for(config.dtype),
        adapters=frozenset({"linear", "experts"}),
        memory=partial(memory, config, model) if model.parameters else None,
        imports=("whet_hf.worker", "transformers.modeling_utils", *model.code),
        forkable=True,
        sleeps=("cpu", "cuda"),
        columns_given=routed_experts(model),
        extras=frozenset({"progress", "likeliest"}),
    )


def memory(config: HfConfig, model: ModelInfo, ranks: int, trained: bool) -> Iterator[MemoryTerm]:
    """Yield the memory of one rank: the whole model, and the most keys and values."""
    dtype = model.dtype_for(config.dtype)
    each = " on each rank" if ranks > 1 else ""
    yield MemoryTerm(f"weights in {dtype}, whole{each}", model.weight_bytes(config.dtype), change=_SMALLER)
    cache = int(config.cache_gib * 2**30)
    if model.max_positions and model.token_cache_bytes:
        cache = min(cache, config.max_batch * model.max_positions * model.token_cache_bytes)
    change = "lower generator.cache_gib or generator.max_batch"
    yield MemoryTerm("keys and values", cache, kept_asleep=False, change=change)


_SMALLER = "compute in bfloat16 (model.dtype or generator.dtype), or take fewer ranks on a machine"
