"""Shows what training data becomes: tokens with their loss mask, and counts over many records. Needs no torch."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen

from whet.errors import DataError
from whet_data.layouts import escaped, records

if TYPE_CHECKING:
    from whet.config.sections import DataFile
    from whet.data.messages import Conversation
    from whet.interfaces.chat import Tokenizer
    from whet.interfaces.data import Encode

QUOTED = 5
"""Number of unusable records that are quoted with their reason."""


@frozen(eq=False)
class Encoded:
    """One sequence of a record."""

    name: str
    """`chosen` or `rejected` for a pair, `desirable` or `undesirable` for a labelled record, else empty."""
    tokens: Any
    """[L]."""
    trained: Any
    """[L], true where the loss is."""


@frozen
class Shown:
    """A record that is shown in full."""

    where: str
    sequences: tuple[Encoded, ...]


@define
class Counts:
    """Counts of the records that were read."""

    records: int = 0
    too_long: int = 0
    """Left out, because a sequence is longer than the limit. No record is truncated."""
    malformed: int = 0
    untrained: int = 0
    """Kept, although the record has no trained token."""
    examples: list[str] = field(factory=list)
    """Why the first malformed records cannot be used."""
    lengths: list[int] = field(factory=list)
    """Tokens of each kept sequence."""
    trained: int = 0
    """Trained tokens of all kept sequences."""
    complete: bool = True
    """Whether every record was read."""

    @property
    def kept(self) -> int:
        """Return the number of records that are trained on."""
        return self.records - self.too_long - self.malformed

    def spread(self) -> dict[str, float]:
        """Return mean, shortest, median, 95th percentile and longest length of the sequences. Empty: there are none."""
        if not self.lengths:
            return {}
        names = {"shortest": 0, "median": 50, "95 %": 95, "longest": 100}
        found = {name: float(np.percentile(self.lengths, at)) for name, at in names.items()}
        return {"mean": float(np.mean(self.lengths)), **found}


def look_at_records(
    files: Sequence["DataFile"], encode: "Encode", names: Mapping[str, str], chat: "Tokenizer", *, limit: int,
    rows: int, most: int, status: Callable[[str], None] = lambda text: None,
) -> tuple[list[Shown], Counts]:  # fmt: skip
    """Tokenise records as training would. Return the first `rows` kept ones, and counts over the first `most` (0: all).

    `limit`: the longest sequence, in tokens; 0: no limit.
    """
    shown, counts = list[Shown](), Counts()
    for row in (row for file in files for row in records(file, names)):
        if most and counts.records >= most:
            counts.complete = False
            break
        counts.records += 1
        try:
            if row.problem:
                raise DataError(row.problem)
            unit = encode(row.record, chat)
        except DataError as error:
            counts.malformed += 1
            counts.examples += [f"{row.where}: {error}"] * (len(counts.examples) < QUOTED)
            continue
        sequences = tuple(_sequence(one) for one in unit)
        if limit and any(len(one.tokens) > limit for one in sequences):
            counts.too_long += 1
            continue
        _count(counts, sequences)
        if len(shown) < rows:
            shown.append(Shown(row.where, sequences))
        if counts.records % 1000 == 0:
            status(f"{counts.records:,} records tokenised")
    return shown, counts


def look_at_prompts(
    prompts: Iterable[tuple[str, "Conversation"]], chat: "Tokenizer", *, limit: int, rows: int, most: int
) -> tuple[list[Shown], Counts]:
    """Tokenise the prompts of tasks as rollouts would. Return the first `rows` kept ones, and counts over the first
    `most`.

    `limit`: the longest prompt that leaves room for a response, in tokens; 0: no limit.
    """
    shown, counts = list[Shown](), Counts()
    for where, prompt in prompts:
        if most and counts.records >= most:
            counts.complete = False
            break
        counts.records += 1
        tokens = chat.prompt(prompt)
        if limit and len(tokens) > limit:
            counts.too_long += 1
            continue
        sequence = Encoded("", tokens, np.zeros(len(tokens), np.bool_))
        counts.lengths.append(len(tokens))
        if len(shown) < rows:
            shown.append(Shown(where, (sequence,)))
    return shown, counts


def _sequence(one: Mapping[str, Any]) -> Encoded:
    name = ("chosen" if one["chosen"] else "rejected") if "chosen" in one else ""
    if "desirable" in one:
        name = "desirable" if one["desirable"] else "undesirable"
    return Encoded(name, np.asarray(one["tokens"]), np.asarray(one["loss_mask"], np.bool_))


def _count(counts: Counts, sequences: Sequence[Encoded]) -> None:
    trained = sum(int(one.trained.sum()) for one in sequences)
    counts.trained += trained
    counts.untrained += trained == 0
    counts.lengths += [len(one.tokens) for one in sequences]


_BYTES = re.compile(r"\\x[0-9a-f]{2}")


@frozen
class Piece:
    """A token as it is shown."""

    token: int
    text: str
    """Text of the token. Characters that could control a terminal are escaped."""
    trained: bool
    special: bool


def pieces(sequence: Encoded, chat: "Tokenizer") -> Iterator[Piece]:
    """Yield the tokens of a sequence as text."""
    special = ~np.isin(sequence.tokens, chat.plain_tokens)
    rows = zip(sequence.tokens.tolist(), chat.pieces(sequence.tokens), sequence.trained, special, strict=True)
    for token, text, is_trained, is_special in rows:
        yield Piece(token, escaped(text), bool(is_trained), bool(is_special))


def whole_characters(found: Sequence[Piece], chat: "Tokenizer") -> list[Piece]:
    r"""Join the tokens of a character that is spread over several tokens, if all of them are trained or none is.

    Such a token by itself can only be shown as bytes, e.g. `\xe6`.
    """
    joined: list[Piece] = []
    for (partial, _), run in itertools.groupby(found, lambda one: (bool(_BYTES.search(one.text)), one.trained)):
        pieces = list(run)
        text = chat.decode([one.token for one in pieces], skip_special=False) if partial else "\ufffd"
        joined += pieces if "\ufffd" in text else [evolve(pieces[0], text=escaped(text))]
    return joined
