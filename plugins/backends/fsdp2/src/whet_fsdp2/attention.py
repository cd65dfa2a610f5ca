"""Attention over packed segments, some of which also attend to a shared prefix.

A packed row is cut into *blocks* that dense kernels can compute. Every segment attends to itself in an `own` block,
causally. All segments with the same prefix attend to that prefix in one `prefix` block, so the keys of a prompt are
read once for the whole group. For a token in both blocks, the two softmaxes are joined by their normalisers:

    o = w o_own + (1 - w) o_prefix        w = exp(lse_own) / (exp(lse_own) + exp(lse_prefix))

The backward pass needs no more than w: in each block, with P the softmax of the block alone and f its weight,

    dV = P' (f dO)      dS = P * (f dO V' - f delta)      delta = rowsum(dO * o)

Small blocks are matrix products that keep P for the backward pass. Large blocks use PyTorch's flash kernels. All this
is for CPUs and attention without a window. GPUs use `whet_fsdp2.varlen`, and where that has no kernel,
`whet_fsdp2.portable`.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from whet.errors import WhetError
from whet_fsdp2.blocks import AttentionPlan, Block, HeadPlan, Part
from whet_fsdp2.few_queries import attend_few, keys_of
from whet_fsdp2.narrowed import NOWHERE, READ
from whet_fsdp2.portable import attend_rows
from whet_fsdp2.varlen import Kernel, attend_varlen, kernel_for

NAME = "whet_packed"
"""Name under which the function is registered with transformers."""


Three = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


class UnsupportedAttentionError(WhetError):
    """The model needs a kind of attention that packed rows do not support."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"backend.layout: packed rows do not work for this model: {reason}; use `layout: padded`")


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    whet_plan: AttentionPlan | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return attention within the segments of a packed row. `transformers` calls this function.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].
    """
    if whet_plan is None:
        raise UnsupportedAttentionError("the model does not pass keyword arguments on to its attention")
    refuse_unsupported(module, query, value, attention_mask, dropout, more)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    window = more.get("sliding_window")
    window = None if window is None or window >= whet_plan.longest() else int(window)
    if whet_plan.piece is None and query.device.type == "cpu" and window is None:
        read = getattr(module, READ, NOWHERE).rows
        if read is not None and (keys := keys_of(whet_plan, read.numpy())) is not None:
            return attend_few(query, key, value, read, keys, scale), None
    attend = partial(_attend, plan=whet_plan, scale=scale, window=window)
    return over_tokens(whet_plan, attend, query, key, value), None


def over_tokens(
    plan: AttentionPlan, attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return attention over the tokens of a row that ranks may share, and 0 at padding behind them.

    query [1, heads, W, d], key and value [1, kv_heads, W, d] -> [1, W, heads, d].
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (piece := plan.piece) is not None:
        q, k, v = (piece.to_heads(x) for x in (q, piece.repeated(k), piece.repeated(v)))
    out = attend(q[: plan.tokens], k[: plan.tokens], v[: plan.tokens])
    if padding := len(q) - plan.tokens:
        out = torch.cat([out, out.new_zeros(padding, *out.shape[1:])])
    return (out if piece is None else piece.to_tokens(out))[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None) -> Tensor:
    """Return attention over a whole row: q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]."""
    if q.device.type != "cpu" or window is not None:
        kernel, _ = kernel_for(q.device, q.dtype, q.shape[2])
        return attend_elsewhere(q, k, v, plan, scale, window, kernel)
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    out: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]  # torch's own
        q.reshape(-1, dim), k.reshape(-1, dim), v.reshape(-1, dim), plan.for_heads(heads, kv_heads, q.device),
        heads, kv_heads, scale,
    )  # fmt: skip
    return out.to(q.dtype).view(-1, heads, dim)


def attend_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None, kernel: Kernel | None
) -> Tensor:
    """Return attention over a whole row by a kernel, or by PyTorch's own function: [T, heads, d]."""
    if kernel is None:
        return attend_rows(q, k, v, plan.for_rows(q.device, window), scale)
    return attend_varlen(q, k, v, plan.for_varlen(q.device), scale, window, kernel)


def refuse_unsupported(
    module: Any, query: Tensor, value: Tensor, mask: Tensor | None, dropout: float, more: dict[str, Any]
) -> None:
    """Raise `UnsupportedAttentionError` if a model's attention is more than the segments of a packed row."""
    for name in ("softcap", "s_aux", "position_bias", "alibi", "head_mask", "indices", "block_indices"):
        if more.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses `{name}`")
    if more.get("sliding_window") is None and has_window(module):
        raise UnsupportedAttentionError("its attention has a window of which only the mask knows")
    if mask is not None or dropout or value.shape[3] != query.shape[3] or query.shape[0] != 1:
        raise UnsupportedAttentionError("its attention has a mask, dropout, or values of another size than its keys")


def has_window(module: Any) -> bool:
    """Return whether the config says that an attention module sees a part of the context. Without one: it sees all."""
    settings, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window, kinds = getattr(settings, "sliding_window", None) or 0, getattr(settings, "layer_types", None)
    if kinds and layer is not None and layer < len(kinds):
        if "sliding" not in kinds[layer]:
            return "chunked" in kinds[layer]
    elif getattr(settings, "use_sliding_window", True) is False:
        return False
    return 0 < window < getattr(settings, "max_position_embeddings", window + 1)


def register() -> None:
    """Register `packed_attention` with transformers, in this process."""
    from transformers import AttentionInterface

    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, packed_attention)


@cache
def register_apart() -> None:
    """Register `packed_attention` as a function that `torch.compile` leaves as it is."""
    from transformers import AttentionInterface

    apart = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]  # torch's own
    AttentionInterface.register(NAME, apart)


class _SegmentAttention(torch.autograd.Function):
    """q [T * heads, d], k and v [T * kv_heads, d] -> [T * heads, d] float32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: HeadPlan, heads: int, kv_heads: int, scale: float
    ) -> Tensor:
        ctx.dtype = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        run = _Run(q.shape[1], heads, kv_heads, scale)
        flat, normaliser, kept_own = run.forward(plan.own, q, k, v)
        out = flat.index_select(0, plan.own.query_back)
        kept_prefix: tuple[Tensor, ...] = ()
        weight = None
        if plan.prefix is not None:
            behind, prefix_normaliser, kept_prefix = run.forward(plan.prefix, q, k, v)
            weight = torch.sigmoid(
                normaliser.index_select(0, plan.own.query_back[plan.tail :])
                - prefix_normaliser.index_select(0, plan.prefix.query_back)
            )[:, None]
            tail = out[plan.tail :]
            tail.copy_(torch.lerp(behind.index_select(0, plan.prefix.query_back), tail, weight))
        ctx.plan, ctx.run, ctx.count = plan, run, len(kept_own)
        ctx.save_for_backward(out, weight, *kept_own, *kept_prefix)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        plan, run = ctx.plan, ctx.run
        count = ctx.count
        out, weight, *kept = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        delta = (upstream * out).sum(1, keepdim=True)
        share = None
        if weight is not None:
            share = torch.cat([weight.new_ones(plan.tail, 1), weight])
        to_q, to_k, to_v = run.backward(plan.own, kept[:count], out, upstream, delta, share)
        dq = to_q.index_select(0, plan.own.query_back)
        dk, dv = to_k.index_select(0, plan.own.key_back), to_v.index_select(0, plan.own.key_back)
        if plan.prefix is not None and share is not None:
            to_q, to_k, to_v = run.backward(plan.prefix, kept[count:], out, upstream, delta, 1 - share)
            dq[plan.tail :] += to_q.index_select(0, plan.prefix.query_back)
            assert plan.prefix.key_target is not None
            dk.index_add_(0, plan.prefix.key_target, to_k.index_select(0, plan.prefix.key_back))
            dv.index_add_(0, plan.prefix.key_target, to_v.index_select(0, plan.prefix.key_back))
        return dq.to(ctx.dtype), dk.to(ctx.dtype), dv.to(ctx.dtype), None, None, None, None


@frozen(eq=False)
class _Run:
    """The forward and backward pass over the blocks of a part."""

    dim: int
    heads: int
    kv_heads: int
    scale: float

    def forward(self, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the gathered outputs, their log normalisers, and the tensors that `backward` needs."""
        q, k, v = q.index_select(0, part.query_rows), k.index_select(0, part.key_rows), v.index_select(0, part.key_rows)
        out = torch.empty_like(q)
        normaliser = q.new_empty(len(q))
        kept = []
        for block in part.blocks:
            kernel = self.flash if block.large else self.small
            kept.append(kernel(block, *self.views(block, q, k, v), out, normaliser))
        return out, normaliser, (q, k, v, *kept)

    def views(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """Return the block's queries [R*kv_heads, repeat*Q, d], and its keys and values [R*kv_heads, K, d]."""
        pairs = block.rows * self.kv_heads
        return (
            q[block.query_slice].view(pairs, -1, self.dim),
            k[block.key_slice].view(pairs, -1, self.dim),
            v[block.key_slice].view(pairs, -1, self.dim),
        )

    def small(self, block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor) -> Tensor:
        if block.mask is None:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.scale)
        else:
            scores = torch.baddbmm(block.mask, q, k.transpose(1, 2), alpha=self.scale)
        if block.merged:
            highest = scores.amax(-1, keepdim=True)
            chances = scores.sub_(highest).exp_()
            sums = chances.sum(-1, keepdim=True)
            chances.div_(sums)
            torch.add(highest.view(-1), sums.log_().view(-1), out=normaliser[block.query_slice])
        else:
            chances = torch.softmax(scores, -1)
        torch.bmm(chances, v, out=out[block.query_slice].view_as(q))
        return chances

    def flash(self, block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normaliser: Tensor) -> Tensor:
        queries, keys, values = self.four(block, q, k, v)
        found, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, block.causal, attn_mask=self.four_mask(block), scale=self.scale
        )
        out[block.query_slice].view_as(queries).copy_(found)
        normaliser[block.query_slice].view_as(lse).copy_(lse)
        return lse.reshape(-1)  # type: ignore[no-any-return]  # an operator found by name

    def four(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """Return queries [R, heads, Q, d], and keys and values repeated for every query head [R, heads, K, d]."""
        shape = (block.rows, self.kv_heads, self.heads // self.kv_heads, block.keys, self.dim)
        return (
            q.view(block.rows, self.heads, block.queries, self.dim),
            k.view(shape[0], shape[1], 1, *shape[3:]).expand(shape).reshape(block.rows, self.heads, block.keys, -1),
            v.view(shape[0], shape[1], 1, *shape[3:]).expand(shape).reshape(block.rows, self.heads, block.keys, -1),
        )

    def four_mask(self, block: Block) -> Tensor | None:
        if block.mask is None:
            return None
        mask = block.mask.view(block.rows, self.kv_heads, 1, block.keys)[:, :1]
        return mask.expand(block.rows, self.heads, block.queries, block.keys)

    def backward(
        self, part: Part, kept: list[Tensor], out: Tensor, upstream: Tensor, delta: Tensor, share: Tensor | None
    ) -> Three:
        """Return the gradients of the gathered q, k and v. `share` is the weight of this part's softmax in each row."""
        q, k, v, *blocks = kept
        factor = part.real if share is None else share.index_select(0, part.query_rows).mul_(part.real)
        g = upstream.index_select(0, part.query_rows).mul_(factor)
        pull = delta.index_select(0, part.query_rows).mul_(factor).neg_()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block, saved in zip(part.blocks, blocks, strict=True):
            views, targets = self.views(block, q, k, v), self.views(block, dq, dk, dv)
            if block.large:
                rows = part.query_rows[block.query_slice]
                joined = saved if share is None else saved - share[rows, 0].log()
                direct = upstream[rows].mul_(part.real[block.query_slice])
                self.flash_back(block, joined, out[rows], direct, views, targets)
            else:
                self.small_back(saved, g[block.query_slice].view_as(views[0]), pull[block.query_slice], views, targets)
        return dq, dk, dv

    def small_back(self, chances: Tensor, g: Tensor, pull: Tensor, views: Three, targets: Three) -> None:
        (q, k, v), (dq, dk, dv) = views, targets
        torch.bmm(chances.transpose(1, 2), g, out=dv)
        slope = torch.baddbmm(pull.view(*q.shape[:2], 1), g, v.transpose(1, 2)).mul_(chances)
        torch.baddbmm(dq, slope, k, beta=0, alpha=self.scale, out=dq)
        torch.baddbmm(dk, slope.transpose(1, 2), q, beta=0, alpha=self.scale, out=dk)

    def flash_back(self, block: Block, lse: Tensor, out: Tensor, g: Tensor, views: Three, targets: Three) -> None:
        # With the joined output and normaliser, the kernel's own formula computes this block's part of the gradients.
        queries, keys, values = self.four(block, *views)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g.view_as(queries), queries, keys, values, out.view_as(queries), lse.view(queries.shape[:3]), 0.0,
            block.causal, attn_mask=self.four_mask(block), scale=self.scale,
        )  # fmt: skip
        targets[0].view_as(dq).copy_(dq)
        for target, gradient in ((targets[1], dk), (targets[2], dv)):
            folded = gradient.reshape(block.rows, self.kv_heads, -1, block.keys, self.dim).sum(2)
            target.view_as(folded).copy_(folded)
