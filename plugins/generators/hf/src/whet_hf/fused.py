"""A decoder for models of the Llama shape (Llama, Mistral, Qwen2, Qwen3), faster than their own code.

The cache is written in place, and all layers run as one function. Matrices with the same input are joined into one,
unless they are in memory of somebody else. The joined matrices are the storage of the model's own parameters. So new
weights that are written into the model are used here, too, and no memory is needed twice.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.data.records import IntArray
from whet_hf.layers import ADAPTER, Cache, Layer, Linears, Shape, compiled, project
from whet_hf.prefixes import Prefixes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_TOKENS = 8192
"""Most tokens of a chunk of prompts that is computed at once, with padding."""
PREFILL_COLUMNS = 65536
"""Most keys of a chunk of prompts, with what is kept of their beginnings. Some kernels hold a score for each."""
PREFILL_PADDING = 256
"""Most padding tokens of a chunk; a quarter of the chunk if that is more."""


def unsupported(config: Any) -> str:
    """Return the part of a model's config that this decoder does not support. Empty: the decoder supports the model."""
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type}"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation {config.hidden_act}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return "sliding-window attention"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"{rope} rotary embeddings"
    if config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        return "partial rotary embeddings"
    return ""


class FusedDecoder:
    """Decodes with the weights of a `transformers` model whose config is not `unsupported`."""

    def __init__(self, model: Any, cache_bytes: int = 0, *, movable: bool = True) -> None:
        """Take the model. `cache_bytes`: keys and values of running and ended sequences together, at most, as far as
        ended ones are kept; 0: none is. `movable`: the parameters may move to other memory.
        """
        config, self.model = model.config, model
        self._cache_bytes, self.prefixes = cache_bytes, Prefixes(cache_bytes)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.shape = Shape(heads, config.num_key_value_heads, head_dim, config.rms_norm_eps)
        self.device, self.dtype = model.device, model.dtype
        # On a CPU attention in bfloat16 is several times slower than in float32.
        self.cache_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self.run_layers = compiled()
        self._inputs = [_of_one_input(layer, movable) for layer in model.model.layers]
        self._tables = torch.empty(0, 2, head_dim)
        self._buffers: dict[int, Tensor] = {}
        self._growing = threading.Lock()
        self.refresh()

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits."""
        return int(self.model.lm_head.weight.shape[0])

    def refresh(self) -> None:
        """Find the adapters, and copy the norm scales of the heads, the only weights that are not the model's storage.

        Keys and values of the old weights are forgotten.
        """
        self.prefixes.clear()
        self.layers = [
            self._layer(layer, *groups) for layer, groups in zip(self.model.model.layers, self._inputs, strict=True)
        ]
        self._head = _linears(self.model.lm_head)

    def free(self) -> int:
        """Free the memory of the cache. Returns the number of bytes."""
        size = self._running() + self.prefixes.clear()
        self._buffers.clear()
        return size

    def _running(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def begin(self, prompts: list[Tensor], owner: Tensor, room: int, lane: int = 0) -> "FusedSession":
        """Return a session whose prompts are computed, with room for `room` tokens after each prompt.

        prompts: [length] each, ascending by length; owner [B], ascending: the prompt of each row. Sessions of
        different lanes may run at the same time. A session ends when its lane begins another session.
        """
        return FusedSession(self, prompts, owner, room, lane)

    def buffer(self, lane: int, *shape: int) -> Tensor:
        """Return the lane's cache memory in a shape. It is kept between batches, because fresh pages are slow."""
        size = torch.Size(shape).numel()
        with self._growing:
            if lane not in self._buffers or self._buffers[lane].numel() < size:
                self._buffers.pop(lane, None)
                self.prefixes.leave(self._cache_bytes - self._running() - size * self.cache_dtype.itemsize)
                self._buffers[lane] = torch.empty(size, dtype=self.cache_dtype, device=self.device)
            return self._buffers[lane][:size].view(shape)

    def reserve(self, positions: int) -> None:
        """Extend the rotary tables to at least this many positions."""
        with self._growing:
            if len(self._tables) < positions:
                size = max(256, 1 << (positions - 1).bit_length())
                like = torch.empty(0, dtype=self.dtype, device=self.device)
                cos, sin = self.model.model.rotary_emb(like, torch.arange(size, device=self.device)[None])
                half = self.shape.head_dim // 2
                self._tables = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)

    def run(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the hidden states after all layers. tokens, positions [N] -> hidden [N, H]."""
        both = self._tables[positions]
        hidden = F.embedding(tokens, self.model.model.embed_tokens.weight)
        return self.run_layers(hidden, both[:, :1], both[:, 1:], self.layers, cache, self.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits. hidden [B, H] -> [B, V]."""
        final = F.rms_norm(hidden, hidden.shape[-1:], self.model.model.norm.weight, self.shape.epsilon)
        return project(final, self._head)

    def _layer(self, layer: Any, qkv: Sequence[Any], gate_up: Sequence[Any]) -> Layer:
        return Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_linears(*qkv),
            head_norm=self._head_norm(layer.self_attn),
            out=_linears(layer.self_attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_linears(*gate_up),
            down=_linears(layer.mlp.down_proj),
        )

    def _head_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight, attention.k_norm.weight
        return torch.cat([query.expand(self.shape.heads, -1), key.expand(self.shape.kv_heads, -1)])


class _Joined(NamedTuple):
    """Linear modules of one input as a single one."""

    weight: Tensor
    bias: Tensor | None


def _linears(*modules: Any) -> Linears:
    """Return the weights, biases and adapters that linear modules of one input have now."""
    return Linears(
        [module.weight for module in modules],
        [module.bias for module in modules],
        [getattr(module, ADAPTER, None) for module in modules],
    )


def _of_one_input(layer: Any, movable: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the modules of a layer that share an input, as one module if they may be joined."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return ([_join(*qkv)], [_join(*gate_up)]) if movable else (qkv, gate_up)


def _join(*linears: Any) -> _Joined:
    """Join weights and biases, and make the parameters of the linears views of them."""
    biased = linears[0].bias is not None
    return _Joined(_views([x.weight for x in linears]), _views([x.bias for x in linears]) if biased else None)


def _views(parameters: list[Tensor]) -> Tensor:
    joined, first = torch.cat([p.detach() for p in parameters]), 0
    for parameter in parameters:
        parameter.data = joined[first : first + len(parameter)]
        first += len(parameter)
    return joined


class FusedSession:
    """A running batch. Prompts are right-aligned in the cache, so every row writes the same column."""

    prompts_routed: Sequence[Any] = ()
    routed: Any = None
    """A dense model has no experts to record."""

    def __init__(self, decoder: FusedDecoder, prompts: list[Tensor], owner: Tensor, room: int, lane: int) -> None:
        self._decoder, self._rows = decoder, len(owner)
        lengths = torch.tensor([len(p) for p in prompts], device=owner.device)
        self._filled = len(prompts[-1])
        columns, shape = self._filled + room, decoder.shape
        decoder.reserve(columns)
        self._cleared = decoder.prefixes.cleared
        self._cache = decoder.buffer(lane, len(decoder.layers), 2, self._rows, shape.kv_heads, columns, shape.head_dim)
        self._views()
        self._position = lengths[owner]
        self._bias: Tensor | None = None  # [B, kv_heads, columns]
        if len(prompts[0]) < self._filled:
            padded = torch.arange(columns, device=owner.device) < (self._filled - self._position)[:, None]
            bias = torch.zeros(padded.shape, dtype=self._cache.dtype, device=owner.device)
            self._bias = bias.masked_fill_(padded, -torch.inf)[:, None].expand(-1, shape.kv_heads, -1).contiguous()
        self.logits = decoder.logits(self._prefill(prompts, owner))[owner]  # [B, V], of the next token

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row. tokens [B]."""
        self._filled += 1
        bias = None if self._bias is None else self._bias[:, :, : self._filled].reshape(-1, 1, self._filled)
        cache = Cache(self._keys, self._values, self._filled, bias, None, None, None, width=1, past=0, mask=None)
        self.logits = self._decoder.logits(self._decoder.run(tokens, self._position, cache))
        self._position = self._position + 1

    def ended(self, row: int, tokens: IntArray, prompt: int) -> None:
        """Keep what was computed of a row that ends, for a prompt that begins with its tokens."""
        computed = self._cache[:, :, row, :, self._filled - len(tokens) : self._filled]
        self._decoder.prefixes.keep(tokens, prompt, computed, self._cleared)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. Cheap if most rows keep their place."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        self._cache[:, :, moved, :, : self._filled] = self._cache[:, :, rows[moved], :, : self._filled]
        self._rows = len(rows)
        self._views()
        self._position, self.logits = self._position[rows], self.logits[rows]
        if self._bias is not None:
            self._bias = self._bias[rows]

    def _views(self) -> None:
        live = self._cache[:, :, : self._rows].flatten(2, 3)  # [layers, 2, B * kv_heads, columns, D]
        self._keys, self._values = list(live[:, 0]), list(live[:, 1])

    def _prefill(self, prompts: list[Tensor], owner: Tensor) -> Tensor:
        """Compute each prompt once and fill the cache of its rows. Returns the last hidden states [prompts, H].

        What is kept of an ended sequence is copied and not computed.
        """
        known = [self._decoder.prefixes.find(prompt.cpu().numpy()) for prompt in prompts]
        left = [len(prompt) - length for prompt, (_, length) in zip(prompts, known, strict=True)]
        order = sorted(range(len(prompts)), key=left.__getitem__)
        rows = torch.split(torch.arange(len(owner), device=owner.device), torch.bincount(owner).tolist())
        hidden, places = [], []
        for first, last in _chunks([left[i] for i in order], [len(prompts[i]) for i in order]):
            chunk = sorted(order[first:last])
            places += chunk
            chosen = [(prompts[i], rows[i], known[i][0]) for i in chunk]
            hidden.append(self._prefill_chunk(chosen, width=left[order[last - 1]]))
        found = torch.cat(hidden)
        return torch.empty_like(found).index_copy_(0, torch.tensor(places, device=found.device), found)

    def _prefill_chunk(self, chosen: list[tuple[Tensor, Tensor, Tensor | None]], width: int) -> Tensor:
        """Compute the last `width` tokens of prompts. chosen: each prompt, its rows, and keys and values of its
        beginning.
        """
        device, filled = self._cache.device, self._filled
        pasts = [max(0, len(prompt) - width) for prompt, _, _ in chosen]
        past = max(pasts)
        pads = torch.tensor([width - len(prompt) for prompt, _, _ in chosen], device=device)  # below 0: a past
        tokens = torch.stack([F.pad(prompt[-width:], (max(0, width - len(prompt)), 0)) for prompt, _, _ in chosen])
        positions = (torch.arange(width, device=device) - pads[:, None]).clamp(min=0)
        mask = None
        if past or int(pads.max()) > 0:
            columns = torch.arange(-past, width, device=device)
            real, own = columns >= pads[:, None], columns == torch.arange(width, device=device)[:, None]
            mask = real[:, None] & (columns <= torch.arange(width, device=device)[:, None])
            # Padding attends to itself, because attention without any key would be NaN.
            mask = (mask | own)[:, None]
        rows = torch.cat([own for _, own, _ in chosen])
        counts = torch.tensor([len(own) for _, own, _ in chosen], device=device)
        owner = torch.arange(len(chosen), device=device).repeat_interleave(counts)
        for (_, own, kept), length in zip(chosen, pasts, strict=True):
            first, end = int(own[0]), int(own[-1]) + 1
            # Masked, but 0 times an uninitialised number may be NaN.
            self._cache[:, :, first:end, :, : filled - width - length] = 0
            if length:
                assert kept is not None
                self._cache[:, :, first:end, :, filled - width - length : filled - width] = kept[:, :, None, :, :length]
        keys, values = list(self._cache[:, 0]), list(self._cache[:, 1])
        firsts = torch.stack([own[0] for _, own, _ in chosen])
        view = Cache(keys, values, filled, None, owner, rows, firsts, width, past, mask)
        return self._decoder.run(tokens.flatten(), positions.flatten(), view).view(len(chosen), width, -1)[:, -1]


def _chunks(lengths: list[int], wholes: list[int]) -> list[tuple[int, int]]:
    """Return chunks (first, end) of prompts that are neither too large nor too much padding.

    lengths: tokens of each prompt that are to be computed, ascending; wholes: all its tokens.
    """
    chunks, first, real, longest = [], 0, 0, 0
    for i, (length, whole) in enumerate(zip(lengths, wholes, strict=True)):
        count, longest = i - first + 1, max(longest, whole)
        padded = count * length
        padding = padded - real - length
        large = padded > PREFILL_TOKENS or count * longest > PREFILL_COLUMNS
        if i > first and (large or padding > max(PREFILL_PADDING, padded // 4)):
            chunks.append((first, i))
            first, real, longest = i, 0, whole
        real += length
    return [*chunks, (first, len(lengths))]
