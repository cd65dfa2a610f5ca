"""Cut a packed row into blocks that dense kernels can compute, and build the gathers around the blocks.

Every segment attends to itself in an `own` block, causally. All segments with the same prefix attend to that prefix in
one `prefix` block. Segments of similar length are padded to one size and share a block. NumPy builds the index tensors
once for each micro-batch; every layer uses the same ones.
"""

from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from whet_fsdp2.context import Piece
from whet_fsdp2.portable import RowPlan, plan_rows
from whet_fsdp2.varlen import VarlenPlan, plan_varlen
from whet_training.layout import Ints, bins, ranges

SMALL = 160 * 160
"""A block with at most this many scores (queries x keys of one head) is computed by plain matrix products."""


@frozen(eq=False)
class Block:
    """R segments x `heads` pairs of query rows [queries, d] and key rows [keys, d]: slices of the gathered arrays."""

    rows: int
    queries: int
    keys: int
    query_slice: slice
    key_slice: slice
    causal: bool
    mask: Tensor | None
    """[1 or R*kv_heads, 1 or queries, keys] is added to the scores."""
    merged: bool
    """Whether the block's softmax is joined with the softmax of another block."""

    @property
    def large(self) -> bool:
        """Return whether a flash kernel computes the block."""
        return self.queries * self.keys > SMALL


@frozen(eq=False)
class Part:
    """Blocks with the gathers around them. Rows are (token, head) pairs: x [T, heads, d] as [T * heads, d]."""

    query_rows: Tensor
    """The row of q that each gathered query comes from. Padding repeats a row of the same segment."""
    real: Tensor
    """[gathered queries, 1] 1.0 for a real query, 0.0 for padding."""
    query_back: Tensor
    """The index of each row's gathered query. Rows are in order: all tokens, or the tokens with a prefix."""
    key_rows: Tensor
    """The row of k and v that each gathered key comes from. Padding repeats a row of the same segment."""
    key_back: Tensor
    """The index of each key row's gathered key: for all tokens, or for the prefixes."""
    key_target: Tensor | None
    """The rows of k and v that `key_back` lists. None: all rows, in order."""
    blocks: tuple[Block, ...]


@frozen(eq=False)
class HeadPlan:
    """The gathers and blocks of one packed row, for given numbers of heads."""

    own: Part
    prefix: Part | None
    tail: int
    """The first query row whose token has a prefix."""


@frozen(eq=False)
class AttentionPlan:
    """The segments of a packed row. Index tensors are made once, and every layer uses them."""

    lengths: Ints
    """[S] tokens of each segment."""
    prefix: Ints
    """[S] the prefix segment of each segment, or -1. Segments with a prefix come last."""
    piece: Piece | None = None
    """This rank's part of the row, if ranks share it."""
    _made: dict[tuple[int, int, torch.device], HeadPlan] = field(factory=dict, init=False)
    _rows: dict[tuple[torch.device, int | None], RowPlan] = field(factory=dict, init=False)
    _varlen: dict[torch.device, VarlenPlan] = field(factory=dict, init=False)

    @property
    def tokens(self) -> int:
        """Return the number of tokens. A row may have padding behind them."""
        return int(self.lengths.sum())

    def longest(self) -> int:
        """Return the longest distance, in tokens, over which a token attends."""
        behind = np.where(self.prefix >= 0, self.lengths[self.prefix], 0)
        return int((self.lengths + behind).max())

    def for_rows(self, device: torch.device, window: int | None = None) -> RowPlan:
        """Return the blocks that `attend_rows` needs."""
        key = device, window
        if key not in self._rows:
            self._rows[key] = plan_rows(self.lengths, self.prefix, device, window)
        return self._rows[key]

    def for_varlen(self, device: torch.device) -> VarlenPlan:
        """Return the sequences that `attend_varlen` needs."""
        if device not in self._varlen:
            self._varlen[device] = plan_varlen(self.lengths, self.prefix, device)
        return self._varlen[device]

    def for_heads(self, heads: int, kv_heads: int, device: torch.device) -> HeadPlan:
        """Return the gathers and blocks for a number of query heads and key heads."""
        key = (heads, kv_heads, device)
        if key not in self._made:
            self._made[key] = _Builder(self, heads, kv_heads, device).build()
        return self._made[key]


class _Builder:
    """Builds the gathers of a plan with NumPy."""

    def __init__(self, plan: AttentionPlan, heads: int, kv_heads: int, device: torch.device) -> None:
        self.lengths, self.prefix = plan.lengths, plan.prefix
        self.place = np.cumsum(self.lengths) - self.lengths
        self.tokens = plan.tokens
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
        tokens = ranges(self.place[order], self.lengths[order])  # tokens of all completions, grouped by prefix
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
        """Return the mask that is added to the scores. None for a large causal block: the flash kernel masks it."""
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
    """The tokens of a block: queries [R, Q] and keys [R, K], with flags that are true where a token is not padding."""

    token: Ints
    real: Any
    keys: Ints
    key_real: Any
    causal: bool
    merged: bool
