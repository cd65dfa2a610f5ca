"""Layers of plain PyTorch: a test vehicle, so that everything of Megatron but Transformer Engine runs on a CPU.

Megatron's own modules without Transformer Engine know no sequence parallelism, no packed sequences and no context
parallelism. Its schedules, mappings and sums of gradients do, and these modules bring the rest: norms, and attention
within the sequences of a packed row, whose keys and values the ranks of a context group gather.

Parameters have the names that Transformer Engine gives them, so rules and checkpoints are the same for both.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from whet_megatron.feed import zigzag


class PlainRMSNorm(torch.nn.RMSNorm):
    """A norm whose gradient Megatron adds up over the ranks that share tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by Megatron


class PlainNormLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """A norm and the matrix after it, as one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        weight: Any = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight = weight
        self._epsilon = config.layernorm_epsilon

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the norm of `x`."""
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self._epsilon)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return what a checkpoint holds of it. The norm is whole on every rank."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets)


class PlainAttention(torch.nn.Module):
    """Causal attention of rows [tokens, rows, heads, d], or within the sequences of a packed row [tokens, heads, d]."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        known = getattr(pg_collection, "cp", None)
        self._group = known if known is not None else parallel_state.get_context_parallel_group()
        self._scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, attn_mask_type: Any = None,
        attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Return [tokens, rows, heads * d], or [tokens, 1, heads * d] of a packed row."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        ranks = self._group.size()
        ends = packed_seq_params.cu_seqlens_q.cpu().numpy() if packed else np.array([0, query.shape[0] * ranks])
        held = [zigzag(ends, rank, ranks) for rank in range(ranks)]
        if ranks > 1:
            order = torch.from_numpy(np.argsort(np.concatenate(held))).to(query.device)
            key, value = (self._gathered(tensor)[order] for tensor in (key, value))
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        places = torch.from_numpy(held[self._group.rank()]).to(query.device)
        found = []
        for begin, end in pairwise(ends.tolist()):  # one by one: a mask over the whole row would cost its square
            own, every = slice(begin // ranks, end // ranks), slice(begin, end)
            attended = F.scaled_dot_product_attention(
                queries[:, :, own],
                keys[:, :, every],
                values[:, :, every],
                attn_mask=torch.arange(begin, end, device=query.device) <= places[own, None],
                scale=self._scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
            found.append(attended)
        return torch.cat(found, 2).permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensor of all ranks. Its gradient is added up, and each rank gets its part."""
        whole: Tensor = gather_from_sequence_parallel_region(
            tensor.contiguous(), tensor_parallel_output_grad=True, group=self._group
        )
        return whole


def plain_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return the specification of the layers of one stage."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    modules, attention = layer.submodules, layer.submodules.self_attention.submodules
    modules.input_layernorm = IdentityOp
    attention.linear_qkv, attention.core_attention = PlainNormLinear, PlainAttention
    if config.num_moe_experts is None:
        modules.pre_mlp_layernorm = IdentityOp
        modules.mlp.submodules.linear_fc1 = PlainNormLinear
    else:
        modules.pre_mlp_layernorm = PlainRMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = PlainRMSNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=PlainRMSNorm)
