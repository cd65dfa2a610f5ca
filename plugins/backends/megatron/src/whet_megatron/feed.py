"""From a micro-batch to the tensors of one forward pass of Megatron.

    packed      a a a . b b b b b . . . | . .         `.`: padding at the end of sequences, and one sequence of padding
    padded      one row for each sequence

Ranks that share sequences (context parallel) hold of each sequence two pieces, so its length is padded to a multiple of
twice their number; ranks that share tokens of norms (sequence parallel) need a multiple of theirs. Padding comes after
the tokens that it could change, and its outputs are not read.
"""

import math
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from whet.data.batch import Batch
from whet.interfaces.axes import RankCoordinates
from whet_megatron.parallel import ParallelConfig
from whet_training.experts import COLUMN
from whet_training.gathering import Gathering
from whet_training.layout import Ints, Row, Rows, pack, places, ranges, used_lengths
from whet_training.outputs import ids_at, temperatures
from whet_training.routing import by_layer


@frozen(eq=False)
class Entered:
    """The tokens of sequences that enter a forward pass, as the routers of experts on a rank see them."""

    rows: int
    """All tokens that the routers see, with padding."""
    at: Ints
    """[U] the places of the tokens of sequences among them, time first."""
    sampled: Any = None
    """[U, layers, k] the sampler's experts of these tokens. None: nothing is recorded."""


@frozen(eq=False)
class Feed:
    """The inputs of one forward pass on a rank, and the tokens whose outputs are computed."""

    tokens: Tensor
    """[rows, T] this rank's tokens."""
    positions: Tensor
    """[rows, T] their positions in their own sequences."""
    packed: Any
    """Megatron's `PackedSeqParams` of a packed row. None: there is a row for each sequence."""
    source: Tensor
    """[m] places of the hidden states from which this rank's targets are predicted, among T x rows, time first."""
    targets: Tensor
    """[m] this rank's target tokens."""
    where: Tensor
    """[M] positions of all targets among the N tokens of the micro-batch."""
    temperature: Tensor | None
    """[m] float32. None: 1 everywhere."""
    count: int
    """N, the number of tokens of the micro-batch."""
    ids: Tensor | None
    """[m, K] further tokens at each of this rank's target positions, from the column `topk_ids`."""
    gathering: Gathering | None = None
    """Which context rank computes which target. None: there is one such rank."""
    entered: Entered | None = None
    """What routers see. None: the model is dense."""


@frozen(eq=False)
class _Laid:
    """A forward pass over all context ranks: tokens [rows, W], and where each target is read."""

    tokens: Ints
    positions: Ints
    ends: Ints
    """Of a packed row: 0 and the ends of its sequences, padding included. Of rows: 0 and W."""
    row: Ints
    """[M] the row of each target."""
    at: Ints
    """[M] the place in the row from which each target is predicted."""
    where: Ints
    """[U] positions, among the N tokens of the micro-batch, of those that enter the pass."""
    entered: tuple[Ints, Ints]
    """[U] their rows, and [U] their places in them."""


class Feeder:
    """Makes the feeds of a rank."""

    def __init__(
        self, sizes: ParallelConfig, layout: Any, device: torch.device, context: Any, mine: RankCoordinates,
        experts: tuple[int, int] | None = None, multiple: int = 1,
    ) -> None:  # fmt: skip
        """`context`: the group of the ranks that share sequences, or None. `mine`: this rank's coordinates.

        `experts`: of a mixture of experts the number of layers, and of experts that compute a token. `multiple`: the
        tokens of a row on each rank are padded to a multiple of it.
        """
        self._sizes, self._layout, self._device = sizes, layout, device
        self._context, self._rank, self._tensor_rank = context, mine.context, mine.tensor
        self._experts = experts
        self._piece = 2 * sizes.context if sizes.context > 1 else 1
        self._whole = math.lcm(self._piece, multiple * sizes.context) * (sizes.tensor if sizes.sequence else 1)

    def feed(self, batch: Batch) -> Feed:
        """Return the inputs of the forward pass of a NumPy micro-batch."""
        if not used_lengths(batch).any():
            return self.nothing(batch)
        found = pack(batch, self._layout)
        where, flat = places(batch, found) if self._experts else (np.zeros(0, np.int64),) * 2
        laid = self._packed(found, where, flat) if isinstance(found, Row) else self._rows(found, where, flat)
        targets = found.targets
        return self._cut(laid, batch, targets.tokens, targets.where, targets.sequence)

    def nothing(self, batch: Batch) -> Feed:
        """Return the inputs of the smallest forward pass, for a batch without targets. It has no outputs."""
        none, zero = np.zeros(0, np.int64), np.zeros((1, self._whole), np.int64)
        laid = _Laid(zero, np.arange(self._whole)[None], np.array([0, self._whole]), none, none, none, (none, none))
        return self._cut(laid, batch, none, none, none)

    def _packed(self, found: Row, where: Ints, flat: Ints) -> _Laid:
        """Return a packed row whose sequences, and the row as a whole, have lengths that the ranks can share."""
        lengths = -(-found.lengths // self._piece) * self._piece
        rest = -int(lengths.sum()) % self._whole
        padded = np.append(lengths, rest) if rest else lengths
        ends = np.concatenate([[0], np.cumsum(padded)])
        begins = np.cumsum(found.lengths) - found.lengths
        place = np.repeat(ends[: len(lengths)] - begins, found.lengths) + np.arange(int(found.lengths.sum()))
        tokens, positions = np.zeros((2, int(ends[-1])), np.int64)
        tokens[place] = found.tokens
        positions[:] = ranges(np.zeros(len(padded), np.int64), padded)
        at = place[found.targets.source]
        entered = np.zeros(len(flat), np.int64), place[flat]
        return _Laid(tokens[None], positions[None], ends, np.zeros(len(at), np.int64), at, where, entered)

    def _rows(self, found: Rows, where: Ints, flat: Ints) -> _Laid:
        rows, width = found.tokens.shape
        padded = -(-width // self._whole) * self._whole
        tokens = np.zeros((rows, padded), np.int64)
        tokens[:, :width] = found.tokens
        row, at = np.divmod(found.targets.source, width)
        positions, ends = np.tile(np.arange(padded), (rows, 1)), np.array([0, padded])
        return _Laid(tokens, positions, ends, row, at, where, np.divmod(flat, width))

    def _cut(self, laid: _Laid, batch: Batch, targets: Ints, where: Ints, sequence: Ints) -> Feed:
        """Return this rank's part of a forward pass."""
        held = [zigzag(laid.ends, rank, self._sizes.context) for rank in range(self._sizes.context)]
        owner, place = np.empty((2, laid.tokens.shape[1]), np.int64)
        for rank, tokens in enumerate(held):
            owner[tokens], place[tokens] = rank, np.arange(len(tokens))
        gathering = None if self._context is None else Gathering.of(self._context, owner[laid.at])
        mine: Any = slice(None) if gathering is None else gathering.mine
        rows = len(laid.tokens)
        source = (place[laid.at] * rows + laid.row)[mine]
        return Feed(
            self._tensor(laid.tokens[:, held[self._rank]]),
            self._tensor(laid.positions[:, held[self._rank]]),
            self._parameters(laid.ends) if self._layout == "packed" else None,
            self._tensor(source),
            self._tensor(targets[mine]),
            self._tensor(where),
            temperatures(batch, sequence[mine], self._device),
            batch.tokens,
            ids_at(batch, where[mine], self._device),
            gathering,
            self._entered(batch, laid, owner, place) if self._experts else None,
        )

    def _entered(self, batch: Batch, laid: _Laid, owner: Ints, place: Ints) -> Entered:
        """Return what this rank's routers see. owner, place: of each token of a row its context rank, and where there.

        Sequence parallel ranks have a part of the time each.
        """
        assert self._experts is not None
        layers, chosen = self._experts
        row, at = laid.entered
        rows, ranks = len(laid.tokens), self._sizes.tensor if self._sizes.sequence else 1
        time = laid.tokens.shape[1] // (self._sizes.context * ranks)
        tensor, moment = np.divmod(place[at], time)
        mine = (owner[at] == self._rank) & (tensor == (self._tensor_rank if ranks > 1 else 0))
        sampled = None
        if COLUMN in batch:
            sampled = by_layer(batch, range(layers), chosen, layers)[laid.where[mine]]
        return Entered(time * rows, (moment * rows + row)[mine], sampled)

    def _parameters(self, ends: Ints) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        longest, bounds = int(np.diff(ends).max()), torch.from_numpy(ends.astype(np.int32)).to(self._device)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def zigzag(ends: Ints, rank: int, ranks: int) -> Ints:
    """Return which tokens of a row a context rank holds: of each sequence pieces `rank` and `2 ranks - 1 - rank`.

    `ends`: 0 and the ends of all sequences, whose lengths 2 * ranks divides. So ranks share causal attention evenly.
    """
    if ranks == 1:
        return np.arange(int(ends[-1]))
    size = np.diff(ends) // (2 * ranks)
    pieces = np.stack([ends[:-1] + rank * size, ends[:-1] + (2 * ranks - 1 - rank) * size], 1)
    return ranges(pieces.ravel(), np.repeat(size, 2))
