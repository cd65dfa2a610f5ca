"""SGLang's engine arguments: the ones this plugin sets, and the ones the installed engine has. Imports no engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.component import Package
from whet.data.model_info import DTYPE_BYTES, ModelInfo
from whet_generation.external_engine import CPU_CACHE_GIB, ForeignEngine, has_tokenizer
from whet_generation.limits import context_length
from whet_generation.routed_experts import COLUMN
from whet_sglang.config import SglangConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import RoleContext

CPU_BATCH = 64
CPU_MEMORY_FRACTION = 0.9
"""Share of the free memory, an upper bound of the cache. `cache_gib` sets a smaller size."""
KEPT_POSITIONS = 6
"""Positions of the context that the engine does not give to a prompt."""
SWITCH = "WHET_SGLANG"
"""Environment variable of the engines that whet starts. The hooks change only these engines."""
LOADER = "whet_sglang.extension.load"
"""The function that SGLang calls with the data of `update_weights_from_tensor`."""

ENGINE = ForeignEngine(
    Package(
        "SGLang",
        "sglang",
        ("sglang",),
        install="pip install 'whet-sglang[gpu]', or give it a Python of its own by `whet env create sglang`; for a "
        "machine without a GPU see the README of whet-sglang",
    ),
    arguments_in=("srt/arg_groups/fields/*.py",),
    listed_by="`python -m sglang.launch_server --help`",
    ours={
        "model_path": "model.path",
        "tokenizer_path": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "random_seed": "run.seed",
        "dtype": "generator.dtype",
        "context_length": "generator.max_context",
        "max_running_requests": "generator.max_batch",
        "mem_fraction_static": "generator.memory_fraction",
        "max_total_tokens": "generator.cache_gib",
        "tp_size": "generator.tensor_parallel",
        "disable_cuda_graph": "generator.eager",
        "disable_radix_cache": "generator.prefix_caching",
        "dp_size": "cluster.ranks",
        "device": "cluster.gpus",
    },
    fixed={
        "custom_weight_loader": "it is how weights come in",
        "weight_version": "it says which weights made a token",
        "preferred_sampling_params": "how to sample is what a request says",
        "allow_auto_truncate": "a prompt is served whole or refused",
        "skip_tokenizer_init": "it follows from whether the model folder has a tokenizer",
        "enable_memory_saver": "it follows from where the generator runs",
        "enable_weights_cpu_backup": "it follows from where the generator runs",
        "tokenizer_worker_num": "one process asks the engine",
        "skip_server_warmup": "there is no server",
        "enable_return_routed_experts": "it follows from backend.experts",
    },
)


def engine_arguments(config: SglangConfig, context: "RoleContext", device: str) -> dict[str, Any]:
    """Return the arguments of SGLang's engine for a rank on a device, as builtins."""
    on_cpu, model = device == "cpu", context.model
    length = context_length(config.max_context, context.max_context, model.max_positions)
    known = {
        "context_length": _with_kept_positions(length, model.max_positions),
        "max_running_requests": config.max_batch or (CPU_BATCH if on_cpu else None),
        "max_total_tokens": cache_tokens(config, model, on_cpu),
        "attention_backend": "torch_native" if on_cpu else None,
        "sleep_on_idle": True if on_cpu else None,  # else waiting keeps a core busy
    }
    return {
        "model_path": str(Path(model.path).absolute()),
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype_for(config.dtype),
        "random_seed": context.seed % 2**31,
        "device": device,
        "mem_fraction_static": CPU_MEMORY_FRACTION if on_cpu else config.memory_fraction,
        "tp_size": config.tensor_parallel,
        "disable_cuda_graph": on_cpu if config.eager is None else config.eager,
        "disable_radix_cache": not config.prefix_caching,
        "enable_memory_saver": not on_cpu,
        "enable_weights_cpu_backup": not on_cpu,
        "skip_tokenizer_init": not has_tokenizer(model.path),
        "skip_server_warmup": True,
        "custom_weight_loader": [LOADER],
        "log_level": "warning",
        **({"enable_return_routed_experts": True} if COLUMN in context.columns else {}),
        **{name: value for name, value in known.items() if value is not None},
        **config.engine,
    }


def cache_tokens(config: SglangConfig, model: ModelInfo, on_cpu: bool) -> int | None:
    """Return the number of tokens whose keys and values fit into the cache. None: the engine decides."""
    gib = config.cache_gib or (CPU_CACHE_GIB if on_cpu else None)
    if gib is None or not model.token_cache_bytes:
        return None
    number_bytes = DTYPE_BYTES[model.dtype_for(config.dtype)]
    return max(1, int(gib * 2**30) // (model.token_cache_bytes * number_bytes // 4))


def _with_kept_positions(length: int, most: int) -> int | None:
    longer = length + KEPT_POSITIONS
    return (min(longer, most) if most else longer) if length else None
