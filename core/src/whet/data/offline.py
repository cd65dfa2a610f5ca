"""Data of offline algorithms: files in, batches out, and a position in the data is an integer.

    read -> encode (the algorithm's) -> flat columns in memory -> batch(step, size)

The order of epoch e is a permutation derived from the run's seed and e, so any step's batch can be made without
those before it.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from whet import randomness
from whet.config.sections import DataFile, DataSection
from whet.data.batch import Batch
from whet.data.chat import ChatTokenizer
from whet.data.readers import Row, content_hash, read
from whet.errors import DataError

Encode = Callable[[Mapping[str, Any], ChatTokenizer], Sequence[Mapping[str, Any]]]
"""(record, tokenizer) -> the sequences of one unit. Each has `tokens`, `loss_mask`, `prompt_length`, and maybe further
columns: arrays as long as its tokens, or single numbers. Raises `DataError` where the record will not do."""

logger = logging.getLogger(__name__)

QUOTED = 20
"""Malformed records that a report quotes; all of them are counted."""


@define
class DataReport:
    """What became of the records of some files."""

    records: int = 0
    """Rows read."""
    sequences: int = 0
    """Sequences kept."""
    tokens: int = 0
    """Tokens kept."""
    too_long: int = 0
    """Records left out because they are longer than `max_length`."""
    malformed: int = 0
    """Records left out because they cannot be used."""
    examples: list[str] = field(factory=list)
    """The first of those: file, line and reason."""

    def refuse(self, where: str, reason: str) -> None:
        """Count a malformed record."""
        self.malformed += 1
        if len(self.examples) < QUOTED:
            self.examples.append(f"{where}: {reason}")

    def __str__(self) -> str:
        kept = f"{self.records:,} records, {self.sequences:,} sequences, {self.tokens:,} tokens"
        left_out = [f"{self.too_long:,} too long"] * bool(self.too_long)
        left_out += [f"{self.malformed:,} malformed"] * bool(self.malformed)
        return f"{kept}; left out: {', '.join(left_out)}" if left_out else kept


class OfflineData:
    """The data section of a config, with the tokenizer that reads it."""

    def __init__(
        self,
        section: DataSection,
        tokenizer: ChatTokenizer,
        seed: int,
        max_length: int,
        status: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take a section. `max_length` is in tokens, 0 for none; `status` is told how far the tokenising is."""
        self._section, self._tokenizer, self._seed = section, tokenizer, seed
        self._max_length, self._status = max_length, status

    def fingerprint(self) -> str:
        """Hash what decides the batches: the files' contents and the options. Where a file lies does not matter."""
        digest = blake2b(f"{self._max_length}:{self._section.max_bad_records}".encode(), digest_size=16)
        for files in (self._section.train, self._section.validation):
            digest.update(":".join(content_hash(file) for file in files).encode() + b";")
        return digest.hexdigest()

    def prepare(self, encode: Encode) -> "PreparedData":
        """Read and tokenise everything. Raises `DataError` where too many records are malformed or none is left."""
        train = self._read("train", self._section.train, encode)
        validation = self._read("validation", self._section.validation, encode)
        return PreparedData(train, validation, self._seed, self._status)

    def _read(self, name: str, files: Sequence[DataFile], encode: Encode) -> "Part":
        report, columns = DataReport(), Columns()
        said = time.monotonic()
        for row in (row for file in files for row in read(file)):
            report.records += 1
            try:
                unit = self._unit(row, encode)
            except DataError as error:
                report.refuse(row.where, str(error))
                continue
            if self._max_length and any(len(sequence["tokens"]) > self._max_length for sequence in unit):
                report.too_long += 1
            else:
                columns.add(unit)
            if time.monotonic() - said > 1:
                said = time.monotonic()
                self._status(f"{name} data: {report.records:,} records tokenised")
        part = self._accepted(name, files, report, columns)
        if files:
            self._status(f"{name} data: {report}")
        if report.malformed or report.too_long:
            logger.warning("\n  ".join([f"{name} data: {report}", *report.examples]))
        return part

    def _unit(self, row: Row, encode: Encode) -> Sequence[Mapping[str, Any]]:
        if row.problem:
            raise DataError(row.problem)
        return encode(row.record, self._tokenizer)

    def _accepted(self, name: str, files: Sequence[DataFile], report: DataReport, columns: "Columns") -> "Part":
        allowed = self._section.max_bad_records
        if report.malformed > allowed * report.records:
            examples = "\n".join(f"  {example}" for example in report.examples[:5])
            raise DataError(
                f"data.{name}: {report.malformed:,} of {report.records:,} records are malformed, more than the "
                f"{allowed:.1%} that data.max_bad_records allows:\n{examples}"
            )
        if files and not columns.lengths:
            raise DataError(
                f"data.{name}: no record is left of {report.records:,}; {report.too_long:,} are longer than "
                f"{self._max_length} tokens (data.max_length)"
            )
        report.sequences, report.tokens = len(columns.lengths), sum(columns.lengths)
        return Part(columns.batch(), np.cumsum([0, *columns.sizes]), report)


@frozen(eq=False)
class Part:
    """The units of some files, in order."""

    whole: Batch
    """All sequences, one unit after another."""
    starts: Any  # [units + 1], each unit's first sequence
    report: DataReport

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batches(self, size: int) -> "list[Batch]":
        """Give all units in order, in batches of `size` units; the last may be smaller."""
        return [self.take(np.arange(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    def take(self, units: Any) -> Batch:
        """Give the units at these positions; one that is named twice comes twice, as two units."""
        sizes = self.starts[units + 1] - self.starts[units]
        rank = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        batch = self.whole.take(np.repeat(self.starts[units], sizes) + rank)
        owner = np.repeat(np.arange(len(units), dtype=np.int64), sizes)
        tokens = batch["tokens"].astype(np.int64)
        return batch.with_columns(tokens=tokens, unit=owner, group=owner, episode=np.arange(len(rank), dtype=np.int64))


class PreparedData:
    """Tokenised data. A batch is a function of step and size alone."""

    def __init__(
        self, train: Part, validation: Part, seed: int, status: Callable[[str], None] = lambda text: None
    ) -> None:
        self._train, self._validation, self._seed = train, validation, seed
        self.status = status
        """Is told what takes long."""
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def report(self) -> DataReport:
        """What became of the training records."""
        return self._train.report

    def __len__(self) -> int:
        return len(self._train)

    def batch(self, step: int, size: int) -> Batch:
        """Give the batch of a step (from 1) of `size` units; it may begin in one epoch and end in the next."""
        positions = np.arange((step - 1) * size, step * size)
        epochs, places = np.divmod(positions, len(self))
        units = [self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return self._train.take(np.concatenate(units))

    def epoch(self, step: int, size: int) -> float:
        """Give how often the data has been gone through after a step."""
        return step * size / len(self)

    def validation(self, size: int) -> list[Batch]:
        """Give all validation data in order, in batches of `size` units; the last may be smaller."""
        return self._validation.batches(size)

    def with_columns(self, compute: Callable[[str, Part], Mapping[str, Any]]) -> "PreparedData":
        """Give the same data with further columns. `compute(name, part)` gives those of a part: as long as its tokens
        or its sequences; the parts are `train` and `validation`.
        """
        parts = []
        for name, part in (("train", self._train), ("validation", self._validation)):
            columns = compute(name, part) if len(part) else {}
            parts.append(evolve(part, whole=part.whole.with_columns(**columns)))
        return PreparedData(parts[0], parts[1], self._seed, self.status)

    def _permutation(self, epoch: int) -> Any:
        return randomness.generator(self._seed, "data", epoch).permutation(len(self))


class Columns:
    """Collects sequences into flat columns, without an object for each."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.sizes: list[int] = []
        self._flat: dict[str, bytearray] = {}
        self._types: dict[str, Any] = {"tokens": np.dtype(np.int32), "loss_mask": np.dtype(np.bool_)}
        self._single: dict[str, list[Any]] = {"prompt_length": []}

    def add(self, unit: Sequence[Mapping[str, Any]]) -> None:
        """Append a unit's sequences. Every sequence must have the same columns."""
        for sequence in unit:
            length = len(sequence["tokens"])
            for name, column in sequence.items():
                if np.ndim(column) == 0:
                    self._single.setdefault(name, []).append(column)
                    continue
                if len(column) != length:
                    raise ValueError(f"the column {name!r} has {len(column)} entries for {length} tokens")
                dtype = self._types.setdefault(name, np.asarray(column).dtype)
                self._flat.setdefault(name, bytearray()).extend(np.ascontiguousarray(column, dtype).tobytes())
            self.lengths.append(length)
        self.sizes.append(len(unit))

    def batch(self) -> Batch:
        """Give everything as one batch; tokens are int32 here, which halves the memory."""
        count = len(self.lengths)
        own = np.arange(count, dtype=np.int64)
        flat = {"tokens": bytearray(), "loss_mask": bytearray(), **self._flat}
        single = {name: np.asarray(values) for name, values in self._single.items() if name != "prompt_length"}
        return Batch(
            per_token={name: np.frombuffer(column, self._types[name]) for name, column in flat.items()},
            per_sequence={
                "lengths": np.array(self.lengths, np.int64),
                "prompt_lengths": np.array(self._single["prompt_length"], np.int64),
                "group": own,
                "episode": own,
                "unit": own,
                **single,
            },
        )
