"""Megatron's model of a rank: its stages, wrapped for training, with the weights of a folder."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.data import randomness
from whet.data.model_info import ModelInfo
from whet_megatron import architecture, foreign, fp8, layers
from whet_megatron.config import MegatronConfig
from whet_megatron.experts import Experts
from whet_megatron.groups import Ranks
from whet_megatron.layers import Layers
from whet_megatron.lora import Adapters
from whet_megatron.parallel import padded_rows
from whet_megatron.weights import ModelWeights
from whet_training.adapter_files import base_digest
from whet_training.lora import has_head
from whet_training.lora_config import LoraConfig


class ValueHead(nn.Module):
    """The head of a sequence classifier with one label. Every tensor parallel rank holds all of it."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return what a checkpoint holds of it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {}, ())


class HeldModel:
    """The stages that a rank holds of one model."""

    def __init__(
        self, info: ModelInfo, config: MegatronConfig, ranks: Ranks, seed: int,
        *, trained: bool, lora: LoraConfig | None = None, begin: str = "",
    ) -> None:  # fmt: skip
        """Build the stages and read their weights. Raises `WhetError` if weights are missing or of another shape.

        `lora`: the adapters with which it computes. `begin`: a checkpoint of Megatron with the weights. Empty: they are
        in the model folder.
        """
        self.architecture, self.path = architecture.read(info), info.path
        self.dtype = torch.bfloat16 if info.dtype == "bfloat16" else torch.float32
        self.layers = layers.choose(config.layers, ranks.device)
        self.config = transformer_config(self.architecture, config, ranks, self.dtype, self.layers)
        self.value = config.head == "value"
        self._ranks, self._multiple = ranks, config.vocabulary_multiple
        stages = [self._stage(number) for number in range(config.parallel.virtual)]
        self.weights = ModelWeights(stages, self.architecture, info, ranks, value=self.value)
        draws = self.value and (trained or config.reference or has_head(lora))
        drawn = _drawn_head(self.architecture.hidden, seed) if draws else None
        if begin:
            foreign.load(begin, self.weights, new_head=drawn)
        else:
            self.weights.load(info.path, new_head=drawn)
        lowered = [self._lowered(stage) for stage in stages]
        self.adapters: Adapters | None = None
        self.base = ""
        """The digest of the weights that adapters are trained on."""
        if lora is not None:
            self.adapters = Adapters(self.weights, self.architecture, lora, seed, info.architecture)
            self.weights.computing = self.adapters.computing
            self.base = base_digest(Path(info.path))
        self.chunks: list[Any] = [self._wrapped(stage, config, number, trained) for number, stage in enumerate(lowered)]
        """The stages as Megatron's schedules call them."""
        routed = trained and self.architecture.experts > 0
        self.experts = Experts(stages, self.architecture, config, ranks) if routed else None
        """What sees the routers of the trained model. None: it is dense, or frozen."""
        self.config.finalize_model_grads_func = _add_gradients_up
        if trained and config.optimizer.overlap:  # gradients are added up in the last backward pass of a step only
            self.config.no_sync_func = self.chunks[0].no_sync

    def _stage(self, number: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

        virtual = None if self.config.virtual_pipeline_model_parallel_size is None else number
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
        arch, sizes = self.architecture, self._ranks.sizes
        stage = GPTModel(
            config=self.config,
            transformer_layer_spec=layers.specification(self.layers, self.config, virtual),
            vocab_size=padded_rows(arch.vocabulary, sizes.tensor, self._multiple) * sizes.tensor,
            max_sequence_length=1 << 20,  # positions are rotary, so nothing has this size
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=last,
            share_embeddings_and_output_weights=arch.tied and not self.value,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            rope_scaling=bool(arch.rope_factor),
            rope_scaling_factor=arch.rope_factor or 8.0,
            vp_stage=virtual,
        )
        if last and self.value:
            stage.output_layer = ValueHead(arch.hidden, self.dtype, self._ranks.device)
        if last:  # logits never exist as a whole: the head's formula is computed where outputs are
            stage.output_layer.forward = _pass_through
        return stage

    def _lowered(self, stage: Any) -> Any:
        from megatron.core.transformer.module import Float16Module

        stage = stage.to(self._ranks.device)
        return Float16Module(self.config, stage) if self.dtype == torch.bfloat16 else stage

    def _wrapped(self, stage: Any, config: MegatronConfig, number: int, trained: bool) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        if not trained:
            return stage.requires_grad_(False).eval()
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=config.optimizer.overlap,
            use_distributed_optimizer=config.optimizer.distributed,
        )
        return DistributedDataParallel(self.config, options, stage, disable_bucketing=number > 0).train()

    @property
    def head(self) -> Any:
        """Return the head's weight on the last stage: this rank's rows of it, or of a value head all. Else None."""
        stage = self.weights.stages[-1]
        if not stage.post_process:
            return None
        if self.value or not stage.share_embeddings_and_output_weights:
            return stage.output_layer.weight
        return stage.shared_embedding_or_output_weight()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Compute with other adapters meanwhile, see `AdapterSets.using`. Without adapters nothing changes."""
        return nullcontext() if self.adapters is None else self.adapters.using(weights)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what is trained on this rank by its first name in the model folder, or of an adapter by PEFT's."""
        if self.adapters is not None:
            yield from self.adapters.parameters().items()
        else:
            yield from ((one.stored[0], one.parameter) for one in self.weights.ruled.values())

    @property
    def trained_names(self) -> frozenset[str]:
        """Return the names of what is trained on all ranks."""
        return self.weights.names if self.adapters is None else self.adapters.names

    @property
    def trained_dtype(self) -> torch.dtype:
        """Return the dtype of what is trained. Adapters are float32."""
        return self.dtype if self.adapters is None else torch.float32

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters of this rank."""
        for stage in self.weights.stages:
            yield from stage.parameters()


def _add_gradients_up(stages: list[Any], count: Any = None, **options: Any) -> None:
    """Add gradients up over the ranks that hold the same weights. `count`: Megatron would divide by it."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(stages, None, **options)


def _pass_through(hidden: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
    """Return the hidden states in the place of logits."""
    return hidden, None


def _drawn_head(hidden: int, seed: int) -> Tensor:
    """Return a value head drawn from N(0, 1/(hidden size + 1)): Stiennon et al. 2020 (arXiv:2009.01325)."""
    draw = randomness.generator(seed, "value head").standard_normal((1, hidden), np.float32)
    return torch.from_numpy(draw / np.float32(np.sqrt(hidden + 1)))


def transformer_config(
    arch: architecture.Architecture, config: MegatronConfig, ranks: Ranks, dtype: torch.dtype, chosen: Layers
) -> Any:
    """Return Megatron's config of a model."""
    from megatron.core.transformer import TransformerConfig

    sizes, low = ranks.sizes, dtype == torch.bfloat16
    on_gpu = ranks.device.type == "cuda"
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.mlp,
        normalization="RMSNorm",
        layernorm_epsilon=arch.epsilon,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # Fusions that need kernels of CUDA, or compile for a minute on a CPU
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=on_gpu and chosen == "transformer-engine",
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=sizes.sequence,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=low,
        variable_seq_lengths=sizes.pipeline > 1,
        # Gloo still reads the tensor that is sent while Megatron frees it: results change from run to run.
        deallocate_pipeline_outputs=on_gpu,
        overlap_p2p_comm=sizes.virtual > 1,
        batch_p2p_comm=sizes.virtual == 1,
        # A loss is a sum over a count that is global, so gradients are added up over all ranks, never averaged.
        calculate_per_token_loss=True,
        cross_entropy_loss_fusion=False,
        moe_token_dispatcher_type="alltoall",  # of a dense model too: another one refuses lengths that vary
        perform_initialization=False,
        **_recompute(config),
        **(fp8.options(config.fp8) if config.fp8 else {}),
        **(_experts(arch, layers.grouped(config.grouped_experts, chosen)) if arch.experts else {}),
    )


def _recompute(config: MegatronConfig) -> dict[str, Any]:
    if config.gradient_checkpointing is True:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.gradient_checkpointing == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _experts(arch: architecture.Architecture, group: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": arch.experts,
        "moe_ffn_hidden_size": arch.expert_mlp,
        "moe_router_topk": arch.experts_per_token,
        # Weights of chosen experts that add up to 1 are a softmax over the chosen logits alone.
        "moe_router_pre_softmax": not arch.normalize_chosen,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": group,
    }
