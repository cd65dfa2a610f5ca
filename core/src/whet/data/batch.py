"""The ragged batch: all tokens of all sequences one after another, without padding.

    lengths        [3, 2]                 per sequence, leading dimension B = 2
    tokens         [a a a b b]            per token, leading dimension N = 5

Columns are NumPy arrays on the driver and torch tensors in a worker; the same class holds both. A unit is a preference
pair, or else one sequence. Units are never separated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from whet.data import randomness
from whet.errors import DataError

TOKEN_COLUMNS = ("tokens", "loss_mask")
SEQUENCE_COLUMNS = ("lengths", "prompt_lengths", "group", "episode", "unit")


@frozen(eq=False)
class Batch:
    """Ragged sequences with any further columns. There is no allow-list of column names."""

    per_token: Mapping[str, Any]
    """Columns of leading dimension N. Always there: tokens int64, loss_mask bool."""
    per_sequence: Mapping[str, Any]
    """Columns of leading dimension B. Always there: lengths, prompt_lengths, group, episode, unit (int64)."""
    info: Mapping[str, Any] = field(factory=dict)
    """Plain values that belong to the whole batch, e.g. the environment names that `env` indexes. In a run, every batch
    that a backend receives has `step`, the number of the step, and `steps`, the number of steps of the whole run."""

    def __attrs_post_init__(self) -> None:
        for name in TOKEN_COLUMNS:
            if name not in self.per_token:
                raise DataError(f"a batch needs the per-token column {name!r}")
        for name in SEQUENCE_COLUMNS:
            if name not in self.per_sequence:
                raise DataError(f"a batch needs the per-sequence column {name!r}")
        for name, column in self.per_token.items():
            if len(column) != self.tokens:
                raise DataError(f"column {name!r} has {len(column)} entries for {self.tokens} tokens")
        for name, column in self.per_sequence.items():
            if len(column) != self.sequences:
                raise DataError(f"column {name!r} has {len(column)} entries for {self.sequences} sequences")

    @property
    def tokens(self) -> int:
        """Return the number of tokens N."""
        return len(self.per_token["tokens"])

    @property
    def sequences(self) -> int:
        """Return the number of sequences B."""
        return len(self.per_sequence["lengths"])

    def __getitem__(self, name: str) -> Any:
        if name in self.per_token:
            return self.per_token[name]
        if name in self.per_sequence:
            return self.per_sequence[name]
        raise KeyError(f"the batch has no column {name!r}; it has {', '.join(self.columns)}")

    def __contains__(self, name: object) -> bool:
        return name in self.per_token or name in self.per_sequence

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns."""
        return (*self.per_token, *self.per_sequence)

    def with_columns(self, **columns: Any) -> "Batch":
        """Return a batch with columns added or replaced.

        A column of length B is per sequence, a column of length N per token. Where B equals N, an existing column keeps
        its kind and a new column becomes per sequence; the numbers are the same either way.
        """
        per_token, per_sequence = dict(self.per_token), dict(self.per_sequence)
        for name, column in columns.items():
            as_token = len(column) == self.tokens and (len(column) != self.sequences or name in per_token)
            if not as_token and len(column) != self.sequences:
                found = f"Batch.with_columns: column {name!r} has {len(column)} entries"
                raise DataError(f"{found}; the batch has {self.sequences} sequences and {self.tokens} tokens")
            (per_sequence if as_token else per_token).pop(name, None)
            (per_token if as_token else per_sequence)[name] = column
        return evolve(self, per_token=per_token, per_sequence=per_sequence)

    def map(self, function: Callable[[Any], Any], per_sequence: Callable[[Any], Any] | None = None) -> "Batch":
        """Return a batch with a function applied to every column, e.g. to move the columns to a device.

        With `per_sequence`, that function is applied to the columns per sequence, and the other to those per token.
        """
        second = per_sequence or function
        return evolve(
            self,
            per_token={name: function(column) for name, column in self.per_token.items()},
            per_sequence={name: second(column) for name, column in self.per_sequence.items()},
        )

    def take(self, sequences: Any) -> "Batch":
        """Return the sequences at these positions, in this order. NumPy only."""
        sequences = np.asarray(sequences, np.int64)
        lengths = np.asarray(self.per_sequence["lengths"])
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        chosen = lengths[sequences]
        shift = np.repeat(starts[sequences] - (np.cumsum(chosen) - chosen), chosen)
        where = np.arange(int(chosen.sum()), dtype=np.int64) + shift
        return self.map(itemgetter(where), itemgetter(sequences))

    def where(self, keep: Any) -> "Batch":
        """Return the sequences for which keep [B] is true."""
        return self.take(np.flatnonzero(np.asarray(keep)))

    def units(self) -> list[Any]:
        """Return the positions of each unit's sequences. Units are in order of first appearance."""
        _, first, inverse = np.unique(np.asarray(self.per_sequence["unit"]), return_index=True, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
        return [members[i] for i in np.argsort(first, kind="stable")]

    def split(self, parts: int, seed: int | None = None) -> "list[Batch]":
        """Split into minibatches of whole units, of nearly equal numbers of units. With a seed, shuffle them first."""
        units = self.units()
        if parts > len(units):
            raise DataError(f"cannot split {len(units)} units into {parts} minibatches; lower algorithm.minibatches")
        if parts == 1:
            return [self]
        order = np.arange(len(units))
        if seed is not None:
            order = randomness.generator(seed, "minibatches").permutation(order)
        return [self.take(np.concatenate([units[i] for i in part])) for part in np.array_split(order, parts)]

    def shard(self, parts: int) -> "Shards":
        """Split into one batch for each data-parallel rank: whole units, contiguous in order of group, balanced by
        tokens.

        If there are fewer units than ranks, some ranks get no sequence.
        """
        if parts == 1:
            return Shards(self, (self.sequences,))
        lengths, group = np.asarray(self.per_sequence["lengths"]), np.asarray(self.per_sequence["group"])
        _, first, unit = np.unique(np.asarray(self.per_sequence["unit"]), return_index=True, return_inverse=True)
        place = np.argsort(np.lexsort((first, group[first])))[unit]  # [B] position of the unit, in order of group
        cost = np.zeros(len(first), np.int64)
        np.add.at(cost, place, lengths)
        until = np.cumsum(cost)
        middle = until - cost / 2
        owner = np.minimum((middle * parts / max(cost.sum(), 1)).astype(int), parts - 1)
        order = np.argsort(place, kind="stable")
        ordered = self if np.array_equal(order, np.arange(len(order))) else self.take(order)
        return Shards(ordered, tuple(np.bincount(owner[place], minlength=parts).tolist()))


@frozen(eq=False)
class Shards:
    """One batch for each data-parallel rank. Each is a slice of one large batch, cut without copying."""

    batch: Batch
    """All sequences, ordered by rank."""
    counts: tuple[int, ...]
    """Number of sequences of each rank."""

    def __attrs_post_init__(self) -> None:
        if sum(self.counts) != self.batch.sequences:
            raise ValueError(f"shards of {sum(self.counts)} sequences in all of a batch of {self.batch.sequences}")

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[Batch]:
        ends = np.cumsum(np.asarray(self.counts, np.int64))
        tokens = np.concatenate([[0], np.cumsum(self.batch.per_sequence["lengths"])])
        cuts = np.concatenate([[0], ends])
        for bounds in zip(cuts, ends, tokens[cuts], tokens[ends], strict=False):
            begin, end, first, last = map(int, bounds)
            yield self.batch.map(itemgetter(slice(first, last)), itemgetter(slice(begin, end)))


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join NumPy batches with the same columns."""
    first = batches[0]
    return evolve(
        first,
        per_token={name: np.concatenate([b.per_token[name] for b in batches]) for name in first.per_token},
        per_sequence={name: np.concatenate([b.per_sequence[name] for b in batches]) for name in first.per_sequence},
    )


def from_sequences(
    sequences: Sequence[Mapping[str, Any]], *, prompt_lengths: Sequence[int], group: Sequence[int] | None = None,
    unit: Sequence[int] | None = None, episode: Sequence[int] | None = None,
) -> Batch:  # fmt: skip
    """Build a NumPy batch from sequences. Each maps column names to arrays of one length.

    Each sequence needs `tokens` and `loss_mask`. Without `group`, `unit` or `episode`, every sequence is a group, unit
    or episode by itself.
    """
    lengths = np.array([len(s["tokens"]) for s in sequences], np.int64)
    own = np.arange(len(sequences), dtype=np.int64)
    dtypes = {"tokens": np.int64, "loss_mask": np.bool_}
    names = list(sequences[0]) if sequences else list(dtypes)

    def join(name: str) -> Any:
        arrays = [np.asarray(s[name], dtypes.get(name)) for s in sequences]
        return np.concatenate(arrays) if arrays else np.zeros(0, dtypes.get(name))

    def column(given: Sequence[int] | None) -> Any:
        return own if given is None else np.asarray(given, np.int64)

    return Batch(
        per_token={name: join(name) for name in names},
        per_sequence={
            "lengths": lengths, "prompt_lengths": np.asarray(prompt_lengths, np.int64), "group": column(group),
            "episode": column(episode), "unit": column(unit),
        },
    )  # fmt: skip
