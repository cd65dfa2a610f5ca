"""Which sequences are computed together: the micro-batches of a rank. NumPy only.

    units       [p a b] [p c d]   [q e] [q f]   [r g]          (p, q, r: prompts that a group shares)
    pieces      units of a group that stay together, because their prompt is computed once
    bins        pieces, first-fit decreasing: each piece goes into the first micro-batch that has room for it

Micro-batches cost time in which nothing is computed, and every rank runs as many as the rank with the most. So fewer
are better. First-fit decreasing needs at most 11/9 of the fewest possible, plus 2/3 (Dósa 2007).
"""

from collections.abc import Container, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet_training.layout import Ints, Layout, shared_prompts, used_lengths


@frozen
class Piece:
    """Units that stay together."""

    units: tuple[int, ...]
    """Numbers of the units."""
    own: float
    """What the units cost without the prompts that they share with other sequences."""
    prompts: tuple[int, ...] = ()
    """The shared prompts that they need, each once."""


@frozen(eq=False)
class Costs:
    """What sets of units cost. A prompt that several sequences share costs once in each set."""

    groups: tuple[int, ...]
    """The group of each unit, in rising order."""
    units: tuple[Piece, ...]
    """Each unit by itself."""
    prompts: dict[int, float]
    """The cost of each shared prompt."""

    @classmethod
    def of(cls, batch: Batch, units: Sequence[Ints], used: Ints, layout: Layout, pair: float = 0.0) -> "Costs":
        """Return the costs of units in order of group: tokens that pass the model, plus `pair` for each query and key.

        A sequence of which no token is used costs nothing.
        """
        owner = shared_prompts(batch, used) if layout == "shared" else np.full(len(used), -1, np.int64)
        shared = owner >= 0
        before = np.where(shared, np.asarray(batch["prompt_lengths"]), 0)
        own = _cost(used - before, before, pair)
        firsts = np.flatnonzero(owner == np.arange(len(owner)))
        needs = [tuple(sorted({*owner[unit].tolist()} - {-1})) for unit in units] if len(firsts) else [()] * len(units)
        prompts = _cost(before[firsts], np.zeros(len(firsts), np.int64), pair)
        return cls(
            tuple(int(batch["group"][unit[0]]) for unit in units),
            tuple(Piece((number,), float(own[unit].sum()), needs[number]) for number, unit in enumerate(units)),
            dict(zip(firsts.tolist(), prompts.tolist(), strict=True)),
        )

    def total(self, piece: Piece, there: Container[int] = ()) -> float:
        """Return what a piece costs where some prompts are there already."""
        return piece.own + sum(self.prompts[prompt] for prompt in piece.prompts if prompt not in there)

    def pieces(self, limit: float, across: bool = False) -> list[Piece]:
        """Return the units in order, next-fit: in pieces of up to `limit`, of one group each unless `across`.

        A unit that costs more is a piece by itself.
        """
        found: list[Piece] = []
        for _, members in groupby(self.units, key=lambda unit: 0 if across else self.groups[unit.units[0]]):
            last: list[Piece] = []
            there, cost = set[int](), 0.0
            for unit in members:
                more = self.total(unit, there)
                if last and cost + more > limit:
                    found.append(self.join(last))
                    last, there, cost, more = [], set[int](), 0.0, self.total(unit)
                last.append(unit)
                there.update(unit.prompts)
                cost += more
            found.append(self.join(last))
        return found

    def join(self, pieces: Sequence[Piece]) -> Piece:
        """Return the union of pieces. Its units are in order."""
        if len(pieces) == 1:
            return pieces[0]
        return Piece(
            tuple(sorted(number for piece in pieces for number in piece.units)),
            sum(piece.own for piece in pieces),
            tuple(sorted({prompt for piece in pieces for prompt in piece.prompts})),
        )

    def decreasing(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return pieces, the dearest first. Those that cost the same keep their order."""
        return sorted(pieces, key=lambda piece: -self.total(piece))

    def decreasing_groups(self) -> list[Piece]:
        """Return the units of the dearest group first, and of a group the dearest first."""
        groups = self.decreasing(self.pieces(float("inf")))
        return [unit for group in groups for unit in self.decreasing([self.units[number] for number in group.units])]


def _cost(tokens: Ints, before: Ints, pair: float) -> NDArray[np.float64]:
    """Return the cost of segments that attend to themselves, causally, and to `before` tokens before them."""
    cost: NDArray[np.float64] = tokens + pair * (tokens * (tokens + 1) / 2 + tokens * before)
    return cost


def plan(batch: Batch, layout: Layout, budget: int) -> list[Ints]:
    """Return the sequences of each micro-batch: whole units of up to `budget` tokens, the largest micro-batch first.

    Micro-batches of all ranks run in step, so the largest ones of all ranks run at the same time. A unit larger than
    the budget gets a micro-batch of its own. Units without a target are left out.
    """
    used = used_lengths(batch)
    units = [unit for unit in batch.units() if used[unit].any()]
    if layout == "padded":
        return _padded(units, used, budget)
    units.sort(key=lambda unit: int(batch["group"][unit[0]]))
    if units and used.sum() <= budget:  # even without shared prompts
        return [np.concatenate(units)]
    costs = Costs.of(batch, units, used, layout)
    parts = costs.decreasing(_fewest(costs, budget))
    return [np.concatenate([units[number] for number in part.units]) for part in parts]


def _fewest(costs: Costs, budget: int) -> list[Piece]:
    """Return the best of three cuts: the fewest micro-batches, and of those the fewest tokens.

    Units in order, next-fit; whole groups, first-fit decreasing; units of the dearest group first, first-fit, so that
    groups are cut where a micro-batch is full.
    """

    def size(parts: list[Piece]) -> tuple[int, float]:
        return len(parts), sum(costs.total(part) for part in parts)

    best = costs.pieces(budget, across=True)
    least = -(-costs.total(costs.join(costs.units)) // budget)
    for whole in (True, False):
        if len(best) > max(least, 1):
            pieces = costs.decreasing(costs.pieces(budget)) if whole else costs.decreasing_groups()
            best = min(best, first_fit(costs, pieces, budget), key=size)
    return best


def first_fit(costs: Costs, pieces: Sequence[Piece], budget: float) -> list[Piece]:
    """Return pieces joined to bins of up to `budget`: each in the first bin that has room for it.

    Bins that hold a prompt of the piece come before the others.
    """
    bins = _Bins(costs, budget, len(pieces))
    for piece in pieces:
        bins.put(piece)
    return [costs.join(members) for members in bins.members]


@frozen(eq=False)
class _Bins:
    costs: Costs
    budget: float
    most: int
    members: list[list[Piece]] = field(factory=list, init=False)
    holders: dict[int, list[int]] = field(factory=dict, init=False)
    """The bins that hold each prompt."""
    room: Any = field(init=False)

    @room.default
    def _no_room(self) -> NDArray[np.float64]:
        return np.full(self.most, -1.0)

    def put(self, piece: Piece) -> None:
        number, cost = self.find(piece)
        self.members[number].append(piece)
        self.room[number] -= cost
        for prompt in piece.prompts:
            holders = self.holders.setdefault(prompt, [])
            if number not in holders:
                holders.append(number)

    def find(self, piece: Piece) -> tuple[int, float]:
        """Return the bin for a piece, and what the piece costs there."""
        for number in sorted({number for prompt in piece.prompts for number in self.holders.get(prompt, ())}):
            there = [prompt for prompt in piece.prompts if number in self.holders.get(prompt, ())]
            cost = self.costs.total(piece, there)
            if cost <= self.room[number]:
                return number, cost
        cost = self.costs.total(piece)
        fits = self.room[: len(self.members)] >= cost
        if fits.any():
            return int(fits.argmax()), cost
        self.members.append([])
        self.room[len(self.members) - 1] = self.budget
        return len(self.members) - 1, cost


def _padded(units: list[Ints], used: Ints, budget: int) -> list[Ints]:
    """Return micro-batches of units sorted by length. Padding counts."""
    parts: list[list[Ints]] = []
    rows = 0
    # Lengths rise, so the last unit is the widest.
    for unit in sorted(units, key=lambda unit: int(used[unit].max())):
        rows += len(unit)
        if not parts or rows * int(used[unit].max()) > budget:
            parts.append([])
            rows = len(unit)
        parts[-1].append(unit)
    return [np.concatenate(part) for part in reversed(parts)]
