"""The facts of the generator for planning. Imports no torch."""

from collections.abc import Iterator
from functools import partial

from whet.component import GeneratorFacts, MemoryTerm, Problem
from whet.data.model_info import ModelInfo
from whet.interfaces.weights import IN_PLACE
from whet_generation.routed_experts import routed_experts
from whet_hf.config import HfConfig
from whet_weights.lent import TRANSFORMERS


def facts(config: HfConfig, model: ModelInfo) -> GeneratorFacts:
    """Return the transports of weights, and the most memory that weights and cache need."""
    shared = config.weights == "shared"
    return GeneratorFacts(
        transports=(IN_PLACE,) if shared else ("shared", "broadcast", "shared-memory", "disk"),
        in_place=TRANSFORMERS if shared else "",
        problems=partial(problems, config, model) if shared else None,
        # Shared weights change in a training step, during which no request runs.
        on_weight_update=("drain",) if shared else ("drain", "continue", "abort"),
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
    """Yield the memory of one rank: the whole model, unless it is the backend's, and the most keys and values."""
    dtype = model.dtype_for(config.dtype)
    each = " on each rank" if ranks > 1 else ""
    if config.weights == "own":
        weights = model.weight_bytes(config.dtype)
        yield MemoryTerm(f"weights in {dtype}, whole{each}", weights, woken="weights", change=_SMALLER)
    cache = int(config.cache_gib * 2**30)
    if model.max_positions and model.token_cache_bytes:
        cache = min(cache, config.max_batch * model.max_positions * model.token_cache_bytes)
    change = "lower generator.cache_gib or generator.max_batch"
    yield MemoryTerm("keys and values", cache, kept_asleep=False, change=change)


def problems(config: HfConfig, model: ModelInfo, ranks: int) -> Iterator[Problem]:
    """Yield what a model or a number of ranks does not allow of shared weights. Paths are within the section."""
    if ranks > 1:
        words = f"is shared, and the generator has {ranks} ranks; a backend on several ranks splits its weights"
        yield Problem("weights", f"{words}: give both one rank (cluster.ranks or cluster.gpus), or take weights: own")
    if model.dtype_for(config.dtype) != model.dtype:
        words = f"is {config.dtype}, and with weights: shared it is that of the trainer, {model.dtype}"
        yield Problem("dtype", f"{words}; leave it out, or take weights: own")


_SMALLER = "compute in bfloat16 (model.dtype or generator.dtype), or take fewer ranks on a machine"
