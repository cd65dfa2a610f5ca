"""The layers of a model of the Llama shape as one function of tensors, in the part of Python that TorchScript supports.

As TorchScript, the function runs without the interpreter's lock. Threads can decode parts of a batch at the same time,
and each operation starts faster: on two cores a step takes 0.7 of the time. TorchScript is deprecated. Its successor
needs a compiler on the user's machine. If a release of torch has no TorchScript, the same functions run as Python.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ADAPTER = "whet_adapter"
"""The attribute of a linear module that holds A [r, in] and s B [out, r] of an adapter beside its weight."""


class Linears(NamedTuple):
    """Linear maps of one input. Their outputs are joined, in this order."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    adapters: list[tuple[Tensor, Tensor] | None]
    """A [r, in] and s B [out, r]: they add s B A x to the output."""


class Layer(NamedTuple):
    """The weights of one layer. `qkv` gives the heads of queries, then of keys, then of values."""

    input_norm: Tensor
    qkv: Linears
    head_norm: Tensor | None
    """Scales of the norms of queries and keys [heads + kv_heads, head_dim]."""
    out: Linears
    mlp_norm: Tensor
    gate_up: Linears
    down: Linears


class Shape(NamedTuple):
    """The sizes that all layers share."""

    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    """Added to the mean square in the norms."""


class Cache(NamedTuple):
    """Keys and values of a batch, and the masks of its attention."""

    keys: list[Tensor]
    """One tensor for each layer [B * kv_heads, columns, head_dim]; for prompts [B, kv_heads, columns, head_dim]."""
    values: list[Tensor]
    filled: int
    """Columns that are filled when this call ends."""
    bias: Tensor | None
    """[B * kv_heads, 1, filled] is added to scores: minus infinity for padding."""
    owner: Tensor | None
    """For prompts: [rows] the prompt of each row of `rows`. None: one token of each row is computed."""
    rows: Tensor | None
    """For prompts: [rows] the rows of the cache that they fill, ascending by prompt."""
    firsts: Tensor | None
    """For prompts: [prompts] the first row of each."""
    width: int
    """For prompts: tokens of each prompt that are computed, with padding."""
    past: int
    """For prompts: columns before these tokens that they attend to."""
    mask: Tensor | None
    """For prompts with padding or a past: [prompts, 1, width, past + width] true where a query sees a key."""


def run_layers(hidden: Tensor, cos: Tensor, sin: Tensor, layers: list[Layer], cache: Cache, shape: Shape) -> Tensor:
    """Run all layers and fill the cache. Returns the hidden states.

    hidden [N, H]; cos, signed sin [N, 1, head_dim] -> [N, H].
    """
    rotated = shape.heads + shape.kv_heads
    for i, layer in enumerate(layers):
        x = project(norm(hidden, layer.input_norm, shape.epsilon), layer.qkv)
        x = x.view(-1, rotated + shape.kv_heads, shape.head_dim)
        qk = x[:, :rotated]
        head_norm = layer.head_norm
        if head_norm is not None:
            qk = norm(qk, None, shape.epsilon) * head_norm
        qk = torch.addcmul(qk * cos, torch.roll(qk, [shape.head_dim // 2], [-1]), sin)
        queries, keys, values = qk[:, : shape.heads], qk[:, shape.heads :], x[:, rotated:]
        if cache.owner is None:
            mixed = attend_to_cache(queries, keys, values, cache.keys[i], cache.values[i], cache)
        else:
            mixed = attend_to_prompt(queries, keys, values, cache.keys[i], cache.values[i], cache)
        hidden = hidden + project(mixed, layer.out)
        y = project(norm(hidden, layer.mlp_norm, shape.epsilon), layer.gate_up)
        half = y.shape[1] // 2
        hidden = hidden + project(F.silu(y[:, :half]).mul_(y[:, half:]), layer.down)
    return hidden


def project(x: Tensor, maps: Linears) -> Tensor:
    """Return the joined outputs of linear maps. x [N, in] -> [N, sum of out]."""
    outputs: list[Tensor] = []
    for i, weight in enumerate(maps.weights):
        y = F.linear(x, weight, maps.biases[i])
        adapter = maps.adapters[i]
        if adapter is not None:
            y = y + F.linear(F.linear(x, adapter[0]), adapter[1])
        outputs.append(y)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def attend_to_cache(
    queries: Tensor, keys: Tensor, values: Tensor, all_keys: Tensor, all_values: Tensor, cache: Cache
) -> Tensor:
    """Append one token of each row to the cache. Returns its attention to all filled columns.

    queries, keys, values [B, (kv_)heads, D] -> [B, heads * D]. Two batched products are faster on a CPU than the fused
    attention for a single query, and as fast as sharing the prompt's part among the rows of a group.
    """
    batch, size = all_keys.shape[0], queries.shape[2]
    all_keys[:, cache.filled - 1] = keys.reshape(batch, size)
    all_values[:, cache.filled - 1] = values.reshape(batch, size)
    grouped = queries.reshape(batch, queries.shape[1] // keys.shape[1], size).to(all_keys.dtype)
    turned, bias = all_keys[:, : cache.filled].transpose(1, 2), cache.bias
    if bias is None:
        scores = torch.bmm(grouped, turned).mul_(size**-0.5)
    else:
        scores = torch.baddbmm(bias, grouped, turned, alpha=size**-0.5)
    mixed = torch.bmm(torch.softmax(scores, -1), all_values[:, : cache.filled])
    return mixed.view(queries.shape[0], -1).to(values.dtype)


def attend_to_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, all_keys: Tensor, all_values: Tensor, cache: Cache
) -> Tensor:
    """Fill the cache of the rows of each prompt. Returns the attention within the prompts.

    queries, keys, values [prompts * width, (kv_)heads, D] -> [prompts * width, heads * D].
    """
    owner, rows, firsts, mask = cache.owner, cache.rows, cache.firsts, cache.mask
    begin, size = cache.filled - cache.width, queries.shape[2]
    assert owner is not None
    assert rows is not None
    assert firsts is not None
    k = keys.view(-1, cache.width, keys.shape[1], size).transpose(1, 2)
    v = values.view(-1, cache.width, values.shape[1], size).transpose(1, 2)
    all_keys[:, :, begin : cache.filled].index_copy_(0, rows, k.to(all_keys.dtype).index_select(0, owner))
    all_values[:, :, begin : cache.filled].index_copy_(0, rows, v.to(all_values.dtype).index_select(0, owner))
    if cache.past > 0:
        begin = begin - cache.past
        k = all_keys[:, :, begin : cache.filled].index_select(0, firsts).to(keys.dtype)
        v = all_values[:, :, begin : cache.filled].index_select(0, firsts).to(values.dtype)
    mixed = F.scaled_dot_product_attention(
        queries.view(-1, cache.width, queries.shape[1], size).transpose(1, 2), k, v,
        attn_mask=mask, is_causal=mask is None, enable_gqa=queries.shape[1] != keys.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2).reshape(queries.shape[0], -1)


def norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return x divided by its root mean square over the last dimension, times the weight."""
    return F.rms_norm(x, [x.shape[-1]], weight, epsilon)


def compiled() -> Callable[[Tensor, Tensor, Tensor, list[Layer], Cache, Shape], Tensor]:
    """Return `run_layers`, as TorchScript if this torch has it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(run_layers)
    except (AttributeError, RuntimeError):
        return run_layers
