"""The config section of the generator `vllm`."""

from typing import Any, Literal

from attrs import Factory, field, frozen, validators

from whet.config.bounds import GIB, PROCESSES, RETRIES, TOKENS, above, between


@frozen
class VllmConfig:
    """Generates with vLLM, one engine for each rank."""

    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Dtype of the weights and the forward pass. `model`: the value of `model.dtype`."""
    max_context: int = field(default=0, validator=between(0, TOKENS))
    """Longest sequence in tokens: prompt and completion. 0: the longest sequence of the run, limited by the model's
    positions."""
    max_batch: int | None = field(default=None, validator=validators.optional(between(1, RETRIES)))
    """Most sequences that one rank decodes together; further requests wait. null: the engine's default."""
    memory_fraction: float = field(default=0.85, validator=[validators.gt(0), validators.le(1)])
    """Share of a GPU's memory for weights and cache. Ignored on a CPU, and if `cache_gib` is set."""
    cache_gib: float | None = field(default=None, validator=validators.optional(above(0, GIB)))
    """Memory for keys and values on each rank, in GiB. null: the rest of `memory_fraction`; on a CPU 1."""
    tensor_parallel: int = field(default=1, validator=between(1, PROCESSES))
    """Processes over which one engine shards the model; they must divide its attention heads. On GPUs each process has
    its own GPU, so a rank needs this many GPUs, and `cluster.gpus.generator` must be a multiple of it."""
    eager: bool | None = None
    """Whether the model runs without compilation. null: true on CPUs, where compilation needs a compiler and minutes,
    and false on GPUs."""
    prefix_caching: bool = True
    """Whether requests with the same beginning of a prompt share its keys and values."""
    engine: dict[str, Any] = Factory(dict)
    """Further arguments of vLLM's engine by vLLM's names, e.g. `{max_num_batched_tokens: 8192}`. Arguments that the
    installed engine does not have are refused."""
