"""The config section of the generator `vllm`."""

from typing import Any, Literal

from attrs import Factory, field, frozen, validators

from whet.config.bounds import GIB, PROCESSES, RETRIES, TOKENS, above, between


@frozen
class VllmConfig:
    """Generates with vLLM, one engine for each rank."""

    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Of the weights and the forward pass; `model`: as `model.dtype` says."""
    max_context: int = field(default=0, validator=between(0, TOKENS))
    """Longest sequence in tokens, prompt and completion; 0: the longest that the run asks for, and no more than the
    model was made for."""
    max_batch: int | None = field(default=None, validator=validators.optional(between(1, RETRIES)))
    """Sequences decoded together, for each rank; null: the engine's own default. Others wait."""
    memory_fraction: float = field(default=0.85, validator=[validators.gt(0), validators.le(1)])
    """Share of a GPU's memory for weights and cache. Not read on a CPU, nor where `cache_gib` is given."""
    cache_gib: float | None = field(default=None, validator=validators.optional(above(0, GIB)))
    """Memory for keys and values, for each rank; null: what `memory_fraction` leaves, on a CPU 1."""
    tensor_parallel: int = field(default=1, validator=between(1, PROCESSES))
    """Processes over which one engine spreads the model. On GPUs each of them has its own, so a rank takes this many,
    and `cluster.gpus.generator` is a multiple of it."""
    eager: bool | None = None
    """Whether the model runs as it is written, without being compiled; null: on CPUs, where compiling needs a compiler
    and minutes."""
    prefix_caching: bool = True
    """Whether keys and values of a prompt's beginning are shared among the requests that have it."""
    engine: dict[str, Any] = Factory(dict)
    """Any other argument of vLLM's engine by its own name, e.g. `{max_num_batched_tokens: 8192}`; those that are not
    the installed engine's are refused."""
