"""The layout of a micro-batch's sequences in one forward pass. NumPy only.

A *segment* is a run of tokens. They attend to each other causally, and to the whole prefix segment if there is one.

    padded   one row for each sequence, padded to the longest sequence
    packed   each sequence is a segment; all segments follow each other in one row
    shared   packed, and the prompt that several sequences of a group share is one segment, the prefix of their
             completions:

        sequences   [p p p a a] [p p p b] [q q c c]        (p: the prompt of a group of two)
        row          p p p | q q c | a a | b               (segments; those with a prefix come last)

If a completion equals another completion of its group, or is the beginning of one, its hidden states are the same, so
it is not laid out again. The last trained token is only a target: neither it nor any token after it enters the forward
pass.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from whet.data.batch import Batch

Layout = Literal["shared", "packed", "padded"]
Ints = NDArray[np.int64]


@frozen(eq=False)
class Targets:
    """The M target tokens of a forward pass."""

    source: Ints
    """[M] index, in the flattened forward pass, of the hidden state that predicts the token."""
    tokens: Ints
    """[M] the target tokens."""
    where: Ints
    """[M] positions of the targets among the N tokens of the micro-batch."""
    sequence: Ints
    """[M] the sequence of each target."""


@frozen(eq=False)
class Row:
    """A packed forward pass of T tokens."""

    tokens: Ints
    """[T] the tokens of the row."""
    positions: Ints
    """[T] position of each token in its own sequence."""
    lengths: Ints
    """[S] tokens of each segment. Segments without a prefix come first."""
    prefix: Ints
    """[S] the prefix segment of each segment, or -1."""
    targets: Targets
    first: Ints
    """[B] where the first token of each sequence lies."""
    split: Ints
    """[B] the number of tokens of the sequence that lie there, one after another."""
    rest: Ints
    """[B] where the other tokens of the sequence lie."""


@frozen(eq=False)
class Rows:
    """A padded forward pass of R sequences of up to W tokens."""

    tokens: Ints
    """[R, W] the tokens, padded with 0."""
    mask: NDArray[np.bool_]
    """[R, W] true at tokens, false at padding."""
    targets: Targets


def used_lengths(batch: Batch) -> Ints:
    """Return the number of tokens of each sequence that enter the forward pass: all before its last target. -> [B]."""
    ends, hits = np.cumsum(batch["lengths"]), np.flatnonzero(batch["loss_mask"])
    starts = ends - np.asarray(batch["lengths"])
    last = np.searchsorted(hits, ends) - 1  # the last target before the end, maybe of an earlier sequence
    used: Ints = np.maximum(hits[last] - starts, 0) if len(hits) else np.zeros(len(ends), np.int64)
    used[last < 0] = 0
    return used


def shared_prompts(batch: Batch, used: Ints) -> Ints:
    """Return, for each sequence, the first sequence of its group with the same prompt -> [B].

    The value is -1 where no other sequence of the group has the prompt.
    """
    lengths, prompts = np.asarray(batch["lengths"]), np.asarray(batch["prompt_lengths"])
    starts = np.cumsum(lengths) - lengths
    tokens, group = np.ascontiguousarray(batch["tokens"]), np.asarray(batch["group"])
    found: dict[tuple[int, bytes], list[int]] = {}
    for i in np.flatnonzero((used >= prompts) & (prompts > 0)).tolist():
        key = (int(group[i]), tokens[starts[i] : starts[i] + prompts[i]].tobytes())
        found.setdefault(key, []).append(i)
    owner = np.full(len(lengths), -1, np.int64)
    for members in found.values():
        if len(members) > 1:
            owner[members] = members[0]
    return owner


def covering(batch: Batch, used: Ints, owner: Ints) -> Ints:
    """Return, for each sequence with a shared prompt, a sequence whose used tokens begin with its own -> [B].

    Often this is the sequence itself.
    """
    lengths, prompts = np.asarray(batch["lengths"]), np.asarray(batch["prompt_lengths"])
    starts = np.cumsum(lengths) - lengths
    # Big-endian bytes sort in the order of the tokens, so a prefix comes right before a sequence that begins with it.
    tokens = np.ascontiguousarray(batch["tokens"], ">i8")
    found = np.arange(len(lengths))
    rows = np.flatnonzero(owner >= 0).tolist()
    keys = {i: tokens[starts[i] + prompts[i] : starts[i] + used[i]].tobytes() for i in rows}
    rows.sort(key=lambda i: (int(owner[i]), keys[i]))
    for i, following in zip(reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        if owner[i] == owner[following] and keys[following].startswith(keys[i]):
            found[i] = found[following]
    return found


def pack(batch: Batch, layout: Layout) -> Row | Rows:
    """Return the layout of a micro-batch. At least one of its sequences must have a target."""
    used = used_lengths(batch)
    if layout == "padded":
        return _padded(batch, used)
    owner = shared_prompts(batch, used) if layout == "shared" else np.full(len(used), -1, np.int64)
    return _packed(batch, used, owner)


def _packed(batch: Batch, used: Ints, owner: Ints) -> Row:
    lengths, prompts = np.asarray(batch["lengths"]), np.asarray(batch["prompt_lengths"])
    starts = np.cumsum(lengths) - lengths
    own = np.flatnonzero(owner == np.arange(len(owner)))  # the sequences whose prompts become segments
    whole = np.flatnonzero((owner < 0) & (used > 0))
    cover = covering(batch, used, owner)
    parts = np.flatnonzero((owner >= 0) & (used > prompts) & (cover == np.arange(len(owner))))
    segment_of = np.zeros(len(owner), np.int64)
    segment_of[own] = np.arange(len(own))
    offset = np.concatenate([np.zeros(len(own) + len(whole), np.int64), prompts[parts]])
    begin = np.concatenate([starts[own], starts[whole], starts[parts] + prompts[parts]])
    size = np.concatenate([prompts[own], used[whole], used[parts] - prompts[parts]])
    prefix = np.concatenate([np.full(len(own) + len(whole), -1, np.int64), segment_of[owner[parts]]])
    place = np.cumsum(size) - size

    # The tokens of a sequence before `split` lie at `first` + position, the others at `rest` + position - split.
    split = np.where(owner >= 0, prompts, 0)
    first, rest = np.zeros(len(owner), np.int64), np.zeros(len(owner), np.int64)
    first[owner >= 0] = place[segment_of[owner[owner >= 0]]]
    rest[whole] = place[len(own) : len(own) + len(whole)]
    rest[parts] = place[len(own) + len(whole) :]
    rest = rest[cover]
    where, sequence, before = _targets(batch, lengths, starts)
    source = np.where(before < split[sequence], first[sequence], rest[sequence] - split[sequence]) + before
    tokens = np.asarray(batch["tokens"])
    return Row(
        tokens=tokens[ranges(begin, size)],
        positions=ranges(offset, size),
        lengths=size,
        prefix=prefix,
        targets=Targets(source, tokens[where], where, sequence),
        first=first,
        split=split,
        rest=rest,
    )


def _padded(batch: Batch, used: Ints) -> Rows:
    lengths = np.asarray(batch["lengths"])
    starts = np.cumsum(lengths) - lengths
    live = np.flatnonzero(used)
    row = np.zeros(len(used), np.int64)
    row[live] = np.arange(len(live))
    mask = np.arange(int(used.max())) < used[live, None]
    rows = np.zeros(mask.shape, np.int64)
    tokens = np.asarray(batch["tokens"])
    rows[mask] = tokens[ranges(starts[live], used[live])]
    where, sequence, before = _targets(batch, lengths, starts)
    source = row[sequence] * mask.shape[1] + before
    return Rows(rows, mask, Targets(source, tokens[where], where, sequence))


def places(batch: Batch, found: Row | Rows) -> tuple[Ints, Ints]:
    """Return the tokens of a micro-batch that enter its forward pass, and where they lie there -> [U], [U].

    A token that several sequences share enters once for each of them. Values: positions among the N tokens of the
    micro-batch; indices in the flattened forward pass.
    """
    used, lengths = used_lengths(batch), np.asarray(batch["lengths"])
    sequence = np.repeat(np.arange(len(used)), used)
    position = ranges(np.zeros(len(used), np.int64), used)
    where = (np.cumsum(lengths) - lengths)[sequence] + position
    if isinstance(found, Rows):
        return where, np.flatnonzero(found.mask)
    late = position >= found.split[sequence]
    rest = found.rest[sequence] - found.split[sequence]
    return where, position + np.where(late, rest, found.first[sequence])


def _targets(batch: Batch, lengths: Ints, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """Return, for each target: its position among the N tokens, its sequence, and the position before it there."""
    where = np.flatnonzero(np.asarray(batch["loss_mask"]))
    sequence = np.searchsorted(np.cumsum(lengths), where, side="right")
    before = where - starts[sequence] - 1
    keep = before >= 0  # no hidden state predicts the first token of a sequence
    return where[keep], sequence[keep], before[keep]


def ranges(begin: Any, size: Any) -> Ints:
    """Return the ranges begin[i] .. begin[i] + size[i], joined."""
    begin, size = np.asarray(begin, np.int64), np.asarray(size, np.int64)
    shift = np.repeat(begin - (np.cumsum(size) - size), size)
    joined: Ints = np.arange(int(size.sum()), dtype=np.int64) + shift
    return joined


@frozen(eq=False)
class Bin:
    """Segments of similar length that are computed together, padded to the longest of them."""

    members: Ints
    """[R] indices of the segments."""
    width: int


def bins(lengths: Sequence[int] | Ints, slack: float = 1.25, allowance: int = 4) -> list[Bin]:
    """Return groups of similar lengths. No segment is padded to more than slack x its length + allowance."""
    lengths = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    found: list[Bin] = []
    begin = 0
    while begin < len(order):
        width = int(lengths[order[begin]])
        rest = lengths[order[begin:]]
        end = begin + int((rest * slack + allowance >= width).sum())
        found.append(Bin(order[begin:end], width))
        begin = end
    return found
