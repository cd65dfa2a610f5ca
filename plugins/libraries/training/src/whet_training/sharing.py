"""Which rank trains on which sequences: whole units, shared out so that the ranks take equally long. NumPy only.

What a unit costs is what is computed of it: the tokens that pass the model, a shared prompt once for each rank that
has a part of its group, and attention, which grows with the square of the length. So a group is cut only where whole
groups would leave a rank with more work.

    groups      dearest first, each to the rank that has the least work      (longest processing time, Graham 1969)
    cut         the same with groups cut into smaller and smaller pieces, as long as a rank is too far over the mean
    swap        pieces of the rank with the most work against pieces of others
"""

import heapq
from collections.abc import Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from whet.data.batch import Batch, Shards
from whet.data.model_info import ModelInfo
from whet_training.layout import Ints, Layout, used_lengths
from whet_training.packing import Costs, Piece

EVEN = 1.005
"""A rank with at most this many times the mean work is not relieved further."""
SWAPS = 256
"""The largest number of swaps."""


def pair_cost(model: ModelInfo) -> float:
    """Return what a pair of a query and a key costs, in tokens. 0: the config of the model does not say.

    A token costs 2 operations for each parameter that it is multiplied by, a pair 4 for each number of all heads: two
    for its score, two for its value.
    """
    text = model.config.get("text_config")
    config = {**model.config, **(text if isinstance(text, dict) else {})}

    def number(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and value > 0 else 0

    layers, heads, hidden = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    multiplied = layers * model.layer_parameters + model.vocab_size * hidden
    if not (heads and multiplied):
        return 0.0
    return 2 * layers * heads * (number("head_dim") or hidden // heads) / multiplied


def share(batch: Batch, ranks: int, layout: Layout, pair: float = 0.0, live: NDArray[np.bool_] | None = None) -> Shards:
    """Return a shard for each rank. Sequences that are not `live` [B] cost nothing, unless their unit has a live one.

    Within a rank, units are in order of group. If there are fewer units than ranks, some ranks get no sequence.
    """
    if ranks == 1:
        return batch.shard(1)
    units = sorted(batch.units(), key=lambda unit: int(batch["group"][unit[0]]))
    used = used_lengths(batch)
    if live is not None:
        for unit in units:
            used[unit] *= bool(live[unit].any())
    costs = Costs.of(batch, units, used, layout, pair)
    rank_of = _assign(costs, ranks)
    _assign_free(costs, rank_of, [int(np.asarray(batch["lengths"])[unit].sum()) for unit in units], ranks)
    order = np.argsort(rank_of, kind="stable")
    counts = np.bincount(rank_of, weights=[len(unit) for unit in units], minlength=ranks).astype(int)
    rows = np.concatenate([units[number] for number in order]) if len(order) else np.zeros(0, np.int64)
    return Shards(batch.take(rows), tuple(counts.tolist()))


def _assign(costs: Costs, ranks: int) -> Ints:
    """Return the rank of each unit. The rank of a unit that costs nothing is -1."""
    mean = costs.total(costs.join(costs.units)) / ranks
    least = max([mean, *(costs.total(unit) for unit in costs.units)])
    best: _Loads | None = None
    for limit in (mean * ranks, mean / 2, mean / 8, 0.0):
        found = _Loads.over(costs, ranks, [piece for piece in costs.pieces(limit) if costs.total(piece)])
        found.swap(least * EVEN)
        if best is None or found.most() < best.most():
            best = found
        if best.most() <= least * EVEN:
            break
    assert best is not None
    rank_of = np.full(len(costs.units), -1, np.int64)
    for rank, members in enumerate(best.members):
        for piece in members:
            rank_of[list(piece.units)] = rank
    return rank_of


def _assign_free(costs: Costs, rank_of: Ints, lengths: Sequence[int], ranks: int) -> None:
    """Set the ranks of units that cost nothing, so that the ranks receive equally many tokens."""
    received = np.zeros(ranks, np.int64)
    np.add.at(received, rank_of[rank_of >= 0], np.asarray(lengths, np.int64)[rank_of >= 0])
    heap = [(int(tokens), rank) for rank, tokens in enumerate(received)]
    heapq.heapify(heap)
    for number in np.flatnonzero(rank_of < 0).tolist():
        tokens, rank = heap[0]
        rank_of[number] = rank
        heapq.heapreplace(heap, (tokens + lengths[number], rank))


@define(eq=False)
class _Loads:
    """The pieces and the work of each rank."""

    costs: Costs
    members: list[list[Piece]]
    loads: list[float]
    holders: dict[int, set[int]] = field(factory=dict)
    """The ranks that hold each prompt."""

    @classmethod
    def over(cls, costs: Costs, ranks: int, pieces: Sequence[Piece]) -> "_Loads":
        """Return pieces shared out, the dearest first, each where the work is least with it."""
        made = cls(costs, [[] for _ in range(ranks)], [0.0] * ranks)
        heap = [(0.0, rank) for rank in range(ranks)]
        for piece in costs.decreasing(pieces):
            while heap[0][0] != made.loads[heap[0][1]]:  # an old entry of a rank that got a piece with its prompt there
                heapq.heapreplace(heap, (made.loads[heap[0][1]], heap[0][1]))
            rank = min({heap[0][1], *made.homes(piece)}, key=lambda rank: (made.load_with(rank, piece), rank))
            made.loads[rank] = made.load_with(rank, piece)
            made.members[rank].append(piece)
            for prompt in piece.prompts:
                made.holders.setdefault(prompt, set()).add(rank)
        return made

    def homes(self, piece: Piece) -> set[int]:
        """Return the ranks that hold a prompt of the piece."""
        return set[int]().union(*(self.holders.get(prompt, ()) for prompt in piece.prompts))

    def load_with(self, rank: int, piece: Piece) -> float:
        """Return the work of a rank with one more piece."""
        there = [prompt for prompt in piece.prompts if rank in self.holders.get(prompt, ())]
        return self.loads[rank] + self.costs.total(piece, there)

    def most(self) -> float:
        """Return the work of the rank that has the most."""
        return max(self.loads)

    def swap(self, enough: float) -> None:
        """Swap pieces of the rank with the most work for cheaper ones of others, or for nothing, while that helps."""
        for _ in range(SWAPS):
            full = int(np.argmax(self.loads))
            if self.loads[full] <= enough or not any(self.relieve(full, other) for other in self.lightest(full)):
                break

    def lightest(self, full: int) -> list[int]:
        """Return some other ranks, those with the least work first."""
        return [int(rank) for rank in np.argsort(self.loads, kind="stable")[:4] if rank != full]

    def relieve(self, full: int, other: int) -> bool:
        """Make the swap after which the larger load of both is least. Return whether there was one that helps."""
        gap = self.loads[full] - self.loads[other]
        given, taken = self.alone(full), [None, *self.alone(other)]
        if not given or gap <= 0:
            return False
        out = np.array([self.costs.total(piece) for piece in given])
        back = np.array([0.0 if piece is None else self.costs.total(piece) for piece in taken])
        shift = out[:, None] - back[None, :]
        larger = np.maximum(gap - shift, shift)  # above the load of `other` today
        row, column = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[row, column] >= gap * (1 - 1e-6):
            return False
        self.move(given[row], full, other)
        if (piece := taken[column]) is not None:
            self.move(piece, other, full)
        return True

    def alone(self, rank: int) -> list[Piece]:
        """Return the pieces of a rank whose prompts no other piece has, so that they can be moved at their own cost."""
        uses: dict[int, int] = {}
        for prompt in (prompt for piece in self.members[rank] for prompt in piece.prompts):
            uses[prompt] = uses.get(prompt, 0) + 1

        def free(piece: Piece) -> bool:
            return all(uses[prompt] == 1 and len(self.holders[prompt]) == 1 for prompt in piece.prompts)

        return [piece for piece in self.members[rank] if free(piece)]

    def move(self, piece: Piece, source: int, target: int) -> None:
        """Move a piece that shares no prompt with another one."""
        self.members[source].remove(piece)
        self.members[target].append(piece)
        self.loads[source] -= self.costs.total(piece)
        self.loads[target] += self.costs.total(piece)
        for prompt in piece.prompts:
            self.holders[prompt] = {target}
