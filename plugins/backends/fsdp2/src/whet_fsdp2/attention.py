"""Attention over packed segments, some of which also attend to a shared prefix.

A packed row is cut into *blocks* that dense kernels can compute. Every segment attends to itself in an `own` block,
causally. All segments with one prefix attend to it in one `prefix` block, so that a prompt's keys are read once for its
whole group. A token that takes part in both has its two softmaxes joined by their normalisers:

    o = w o_own + (1 - w) o_prefix        w = exp(lse_own) / (exp(lse_own) + exp(lse_prefix))

The backward pass needs no more than w: in each block, with P the softmax of the block alone and f its weight,

    dV = P' (f dO)      dS = P * (f dO V' - f delta)      delta = rowsum(dO * o)

Small blocks are products of matrices with P kept; large ones go through PyTorch's flash kernels.
"""

from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from whet_fsdp2.layout import Ints, bins, ranges

NAME = "whet_packed"
"""Name under which the function is registered with transformers."""
SMALL = 160 * 160
"""Scores of a block, queries x keys of one head, up to which it is computed by plain matrix products."""


Three = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


class UnsupportedAttentionError(Exception):
    """The model asks for a kind of attention that packed rows do not have."""


@frozen(eq=False)
class Block:
    """R segments by `heads` pairs of query rows [queries, d] and key rows [keys, d], slices of gathered arrays."""

    rows: int
    queries: int
    keys: int
    query_slice: slice
    key_slice: slice
    causal: bool
    mask: Tensor | None
    """[1 or R*kv_heads, 1 or queries, keys] added to the scores."""
    merged: bool
    """Whether its softmax is joined with another's."""


@frozen(eq=False)
class Part:
    """Blocks with the gathers around them. Rows are (token, head) pairs: x [T, heads, d] seen as [T * heads, d]."""

    query_rows: Tensor
    """Row of q that each gathered query comes from; padding repeats a row of its own segment."""
    real: Tensor
    """[gathered queries, 1] 1.0, and 0.0 where it is padding."""
    query_back: Tensor
    """Where each row's query went: rows in order, of all tokens or of those that have a prefix."""
    key_rows: Tensor
    """Row of k and v that each gathered key comes from; padding as above."""
    key_back: Tensor
    """Where each key row went: of all tokens, or of the prefixes."""
    key_target: Tensor | None
    """Rows of k and v that `key_back` speaks of; None: all of them, in order."""
    blocks: tuple[Block, ...]


@frozen(eq=False)
class HeadPlan:
    """What the attention of one row needs, for given numbers of heads."""

    own: Part
    prefix: Part | None
    tail: int
    """First query row whose token has a prefix."""


@frozen(eq=False)
class AttentionPlan:
    """The segments of a packed row; index tensors are made once and used by every layer."""

    lengths: Ints
    """[S]"""
    prefix: Ints
    """[S] the segment each attends to, or -1; segments with a prefix come last."""
    _made: dict[tuple[int, int, torch.device], HeadPlan] = field(factory=dict, init=False)

    def longest(self) -> int:
        """Give the longest distance, in tokens, over which a token attends."""
        behind = np.where(self.prefix >= 0, self.lengths[self.prefix], 0)
        return int((self.lengths + behind).max())

    def for_heads(self, heads: int, kv_heads: int, device: torch.device) -> HeadPlan:
        """Give the gathers and blocks for a number of query and key heads."""
        key = (heads, kv_heads, device)
        if key not in self._made:
            self._made[key] = _Builder(self, heads, kv_heads, device).build()
        return self._made[key]


class _Builder:
    """Builds the gathers of a plan with NumPy."""

    def __init__(self, plan: AttentionPlan, heads: int, kv_heads: int, device: torch.device) -> None:
        self.lengths, self.prefix = plan.lengths, plan.prefix
        self.place = np.cumsum(self.lengths) - self.lengths
        self.tokens = int(self.lengths.sum())
        self.heads, self.kv_heads, self.repeat = heads, kv_heads, heads // kv_heads
        self.device = device
        behind = np.flatnonzero(self.prefix >= 0)
        self.first_behind = int(behind[0]) if len(behind) else len(self.prefix)
        self.tail = int(self.place[behind[0]]) if len(behind) else self.tokens

    def build(self) -> HeadPlan:
        has_tail = self.tail < self.tokens
        return HeadPlan(self.own(), self.behind() if has_tail else None, self.tail * self.heads)

    def own(self) -> Part:
        grids = []
        for begin, end in ((0, self.first_behind), (self.first_behind, len(self.lengths))):
            for found in bins(self.lengths[begin:end]):
                members = found.members + begin
                column = np.arange(found.width)
                token = self.place[members, None] + np.minimum(column, self.lengths[members, None] - 1)
                real = column < self.lengths[members, None]
                grids.append(_Grid(token, real, token, real, causal=True, merged=begin > 0 or self.first_behind == 0))
        return self.part(grids, 0)

    def behind(self) -> Part:
        order = np.argsort(self.prefix[self.first_behind :], kind="stable") + self.first_behind
        prefixes, first = np.unique(self.prefix[order], return_index=True)
        queries = np.add.reduceat(self.lengths[order], first)
        tokens = ranges(self.place[order], self.lengths[order])  # of all completions, those of one prefix together
        start = np.cumsum(queries) - queries
        grids = []
        for found in bins(queries):
            chosen = found.members
            column = np.arange(found.width)
            token = tokens[start[chosen, None] + np.minimum(column, queries[chosen, None] - 1)]
            length = self.lengths[prefixes[chosen]]
            key = np.arange(int(length.max()))
            keys = self.place[prefixes[chosen], None] + np.minimum(key, length[:, None] - 1)
            grids.append(
                _Grid(token, column < queries[chosen, None], keys, key < length[:, None], causal=False, merged=True)
            )
        return self.part(grids, self.tail)

    def part(self, grids: "list[_Grid]", first_token: int) -> Part:
        query_rows, real, key_rows, key_real, blocks = [], [], [], [], []
        at_query = at_key = 0
        for grid in grids:
            rows, queries, keys = len(grid.token), grid.token.shape[1], grid.keys.shape[1]
            head = np.arange(self.heads)[None, :, None]
            kv_head = np.arange(self.kv_heads)[None, :, None]
            query_rows.append((grid.token[:, None] * self.heads + head).ravel())
            real.append(np.broadcast_to(grid.real[:, None], (rows, self.heads, queries)).ravel())
            key_rows.append((grid.keys[:, None] * self.kv_heads + kv_head).ravel())
            key_real.append(np.broadcast_to(grid.key_real[:, None], (rows, self.kv_heads, keys)).ravel())
            query_slice = slice(at_query, at_query + len(query_rows[-1]))
            key_slice = slice(at_key, at_key + len(key_rows[-1]))
            at_query, at_key = query_slice.stop, key_slice.stop
            blocks.append(
                Block(
                    rows, queries, keys, query_slice, key_slice, grid.causal, self.mask(grid), grid.merged
                )
            )  # fmt: skip
        all_rows, all_real = np.concatenate(query_rows), np.concatenate(real)
        back = np.empty((self.tokens - first_token) * self.heads, np.int64)
        back[all_rows[all_real] - first_token * self.heads] = np.flatnonzero(all_real)
        keys_real = np.flatnonzero(np.concatenate(key_real))
        all_keys = np.concatenate(key_rows)
        targets = all_keys[keys_real]
        every = len(targets) == self.tokens * self.kv_heads
        if every:
            keys_real = keys_real[np.argsort(targets)]
        return Part(
            self.tensor(all_rows),
            self.tensor(all_real[:, None].astype(np.float32)),
            self.tensor(back),
            self.tensor(all_keys),
            self.tensor(keys_real),
            None if every else self.tensor(targets),
            tuple(blocks),
        )

    def mask(self, grid: "_Grid") -> Tensor | None:
        """Give what is added to the scores; a large causal block leaves it to the flash kernel."""
        queries, keys = grid.token.shape[1], grid.keys.shape[1]
        if grid.causal:
            if queries * keys > SMALL or queries == 1:
                return None
            causal = np.triu(np.full((queries, keys), -np.inf, np.float32), 1)
            return self.tensor(np.tile(causal, (self.repeat, 1)))[None]
        if grid.key_real.all():
            return None
        hidden = np.where(grid.key_real, np.float32(0), np.float32(-np.inf))
        return self.tensor(np.repeat(hidden, self.kv_heads, 0)[:, None])

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


@frozen(eq=False)
class _Grid:
    """The tokens of a block: queries [R, Q] and keys [R, K], and which are no padding."""

    token: Ints
    real: Any
    keys: Ints
    key_real: Any
    causal: bool
    merged: bool


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
    """Attend within the segments of a packed row; the function that transformers calls.

    query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].
    """
    if whet_plan is None:
        raise UnsupportedAttentionError("the model does not pass keyword arguments on to its attention")
    _refuse_unsupported(whet_plan, query, value, attention_mask, dropout, more)
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    plan = whet_plan.for_heads(heads, kv_heads, query.device)
    scale = dim**-0.5 if scaling is None else float(scaling)
    out: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]  # torch's own
        _as_rows(query), _as_rows(key), _as_rows(value), plan, heads, kv_heads, scale
    )
    return out.to(query.dtype).view(1, -1, heads, dim), None


def _as_rows(x: Tensor) -> Tensor:
    """[1, heads, T, d] -> [T * heads, d]."""
    return x[0].transpose(0, 1).reshape(-1, x.shape[3])


def _refuse_unsupported(
    plan: AttentionPlan, query: Tensor, value: Tensor, mask: Tensor | None, dropout: float, more: dict[str, Any]
) -> None:
    window = more.get("sliding_window")
    if window is not None and window < plan.longest():
        raise UnsupportedAttentionError(
            f"it has a sliding window of {window}, shorter than a sequence of {plan.longest()}"
        )
    for name in ("softcap", "s_aux", "position_bias", "alibi", "head_mask"):
        if more.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention uses `{name}`")
    if mask is not None or dropout or value.shape[3] != query.shape[3] or query.shape[0] != 1:
        raise UnsupportedAttentionError("its attention has a mask, dropout, or values of another size than its keys")


def register() -> None:
    """Make the function known to transformers, in this process."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


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
    """The blocks of a part, forward and backward."""

    dim: int
    heads: int
    kv_heads: int
    scale: float

    def forward(self, part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Give gathered outputs, their log normalisers, and what `backward` needs."""
        q, k, v = q.index_select(0, part.query_rows), k.index_select(0, part.key_rows), v.index_select(0, part.key_rows)
        out = torch.empty_like(q)
        normaliser = q.new_empty(len(q))
        kept = []
        for block in part.blocks:
            kernel = self.flash if _is_large(block) else self.small
            kept.append(kernel(block, *self.views(block, q, k, v), out, normaliser))
        return out, normaliser, (q, k, v, *kept)

    def views(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> Three:
        """Give the block's queries [R*kv_heads, repeat*Q, d] and keys and values [R*kv_heads, K, d]."""
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
        """Give [R, heads, Q, d] and, keys repeated for the queries that share them, [R, heads, K, d]."""
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
        """Give gradients of the gathered q, k and v. `share` is the weight of this part's softmax in each row."""
        q, k, v, *blocks = kept
        factor = part.real if share is None else share.index_select(0, part.query_rows).mul_(part.real)
        g = upstream.index_select(0, part.query_rows).mul_(factor)
        pull = delta.index_select(0, part.query_rows).mul_(factor).neg_()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block, saved in zip(part.blocks, blocks, strict=True):
            views, targets = self.views(block, q, k, v), self.views(block, dq, dk, dv)
            if _is_large(block):
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
        # Given the joined output and normaliser, the kernel's own formula gives this block's part of the gradients.
        queries, keys, values = self.four(block, *views)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g.view_as(queries), queries, keys, values, out.view_as(queries), lse.view(queries.shape[:3]), 0.0,
            block.causal, attn_mask=self.four_mask(block), scale=self.scale,
        )  # fmt: skip
        targets[0].view_as(dq).copy_(dq)
        for target, gradient in ((targets[1], dk), (targets[2], dv)):
            folded = gradient.reshape(block.rows, self.kv_heads, -1, block.keys, self.dim).sum(2)
            target.view_as(folded).copy_(folded)


def _is_large(block: Block) -> bool:
    return block.queries * block.keys > SMALL
