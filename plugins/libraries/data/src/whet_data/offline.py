"""Data of offline algorithms: files in, batches out. A position in the data is an integer.

    read -> encode (the algorithm's) -> flat columns in memory -> batch(step, size)

The order of epoch e is derived from the run's seed and e (see `whet_data.mixture`), so any step's batch can be computed
without the batches before it. A batch may begin in one epoch and end in the next. If the run states epochs, its last
batch has the records that are left, so that every record is trained on as often as stated. If a resumed run states more
epochs, it continues with the next record: a checkpoint holds how many records were used.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from hashlib import blake2b
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from whet.config.sections import DataFile, DataSection
from whet.data.batch import Batch
from whet.errors import DataError
from whet.interfaces.chat import Tokenizer
from whet.interfaces.data import Encode
from whet_data.layouts import records
from whet_data.mixture import Mixture, mixture
from whet_data.readers import Row, content_hash, find_file

logger = logging.getLogger(__name__)


def records_of(epochs: float, records: int) -> int:
    """Return the number of records in `epochs` epochs of `records`, exactly: 1.1 epochs of 100 records are 110."""
    return max(1, math.ceil(epochs * records - 1e-6))


def steps_of(epochs: float, records: int, size: int) -> int:
    """Return the number of batches of `size` records in `epochs` epochs of `records`."""
    return math.ceil(records_of(epochs, records) / size)


QUOTED = 20
"""Number of malformed records that a report quotes. All of them are counted."""


@define
class DataReport:
    """Counts of the records of some files."""

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
    """The first malformed records: file, line and reason."""

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
    """The data section of a config, with the tokenizer for its records."""

    def __init__(
        self,
        section: DataSection,
        tokenizer: Tokenizer,
        seed: int,
        max_length: int,
        status: Callable[[str], None] = lambda text: None,
        *,
        encode: Encode | None = None,
        names: Mapping[str, str] = MappingProxyType({}),
        epochs: float | None = None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take a section. `max_length` is in tokens, 0 for no limit. `status` gets the progress of tokenising, which
        runs inside `timed()`.

        `encode` is the algorithm's; `names` maps fields to the columns that the algorithm reads. `epochs`: number of
        passes over the data; None: no end.
        """
        self._timed = timed
        self._section, self._tokenizer, self._seed = section, tokenizer, seed
        self._max_length, self._status = max_length, status
        self._encode, self._names, self._epochs = encode, names, epochs
        self._prepared: PreparedData | None = None
        self._begun: Future[PreparedData] | None = None
        self._before = (0, 0)

    def go_on(self, step: int, position: Mapping[str, int]) -> None:
        """Continue after a step, from the position that was saved with it."""
        if position:
            self._before, self._prepared, self._begun = (step, position["records"]), None, None

    def position(self, step: int, size: int) -> dict[str, int]:
        """Return the position in the data after a step of `size` units, and where the run states epochs, the units of
        one. It is saved with the step: a later attempt may take steps of another size.
        """
        if self._epochs is not None:
            prepared = self.prepare()
            return {"records": prepared.until(step, size), "epoch": len(prepared)}
        before, records = self._before
        return {"records": records + (step - before) * size}

    def fingerprint(self) -> str:
        """Return a hash of what decides the batches: the files' contents and the options. Paths of files do not
        matter.
        """
        digest = blake2b(f"{self._max_length}:{self._section.max_bad_records}".encode(), digest_size=16)
        for files in (self._section.train, self._section.validation):
            digest.update(":".join(content_hash(file) + _reading(file) for file in files).encode() + b";")
        return digest.hexdigest()

    def begin(self) -> None:
        """Begin to read and tokenise all files with the algorithm's own `encode`, on a thread of its own."""
        if self._encode is None or self._prepared is not None or self._begun is not None:
            return
        begun, encode = Future["PreparedData"](), self._encode

        def read() -> None:
            try:
                begun.set_result(self._read_all(encode))
            except BaseException as error:  # `prepare` raises it
                begun.set_exception(error)

        self._begun = begun
        # A daemon: a run that ends early does not wait for this thread.
        threading.Thread(target=read, name="whet-data", daemon=True).start()

    def prepare(self, encode: Encode | None = None) -> "PreparedData":
        """Read and tokenise all files. With the algorithm's own `encode`, the default, this happens once.

        Raises `DataError` if too many records are malformed, or none is left.
        """
        if encode is not None:
            return self._read_all(encode)
        if self._prepared is None:
            if self._encode is None:
                raise ValueError("the algorithm states no `encode` in its facts, and none is given")
            begun, self._begun = self._begun, None
            self._prepared = self._read_all(self._encode) if begun is None else begun.result()
        return self._prepared

    def _read_all(self, encode: Encode) -> "PreparedData":
        with self._timed():
            train = self._read("train", self._section.train, encode)
            validation = self._read("validation", self._section.validation, encode)
        files = self._section.train
        names = [f"data.train.{i}: {file.path}" for i, file in enumerate(files)]
        mixed = mixture(self._seed, train.sizes, [file.weight for file in files], names)
        self._tell_shares(mixed)
        end = None if self._epochs is None else records_of(self._epochs, len(train))
        return PreparedData(train, validation, mixed, self._status, end, self._before)

    def _tell_shares(self, mixed: Mixture) -> None:
        """Report how the files are mixed, if they have weights."""
        for file, size, share in zip(self._section.train, mixed.sizes, mixed.shares or (), strict=False):
            words = f"{share / len(mixed):.1%} of the records, {share / size:.2f} times in an epoch of {len(mixed):,}"
            logger.info("train data: %s: %s", file.path, words)
            self._status(f"train data: {file.path}: {words}")

    def _read(self, name: str, files: Sequence[DataFile], encode: Encode) -> "Part":
        report, columns = DataReport(), Columns()
        for file in files:
            find_file(file)  # raises the error if it cannot be what the config says
        said, sizes = time.monotonic(), [0] * len(files)
        for i, row in ((i, row) for i, file in enumerate(files) for row in records(file, self._names)):
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
                sizes[i] += 1
            if time.monotonic() - said > 1:
                said = time.monotonic()
                self._status(f"{name} data: {report.records:,} records tokenised")
        part = self._accepted(name, files, report, columns, tuple(sizes))
        if files:
            self._status(f"{name} data: {report}")
        if report.malformed or report.too_long:
            logger.warning("\n  ".join([f"{name} data: {report}", *report.examples]))
        return part

    def _unit(self, row: Row, encode: Encode) -> Sequence[Mapping[str, Any]]:
        if row.problem:
            raise DataError(row.problem)
        return encode(row.record, self._tokenizer)

    def _accepted(
        self, name: str, files: Sequence[DataFile], report: DataReport, columns: "Columns", sizes: tuple[int, ...]
    ) -> "Part":
        allowed = self._section.max_bad_records
        if report.malformed > allowed * report.records:
            examples = "\n".join(f"  {example}" for example in report.examples[:5])
            raise DataError(
                f"data.{name}: {report.malformed:,} of {report.records:,} records are malformed, more than the "
                f"{allowed:.1%} that data.max_bad_records allows:\n{examples}"
            )
        if report.too_long > self._section.max_too_long * report.records and columns.lengths:
            raise DataError(
                f"data.{name}: {report.too_long:,} of {report.records:,} records are longer than {self._max_length} "
                f"tokens, more than the {self._section.max_too_long:.0%} that data.max_too_long allows; raise "
                "data.max_length as far as the model allows, cut the records, or raise data.max_too_long"
            )
        if files and not columns.lengths:
            raise DataError(
                f"data.{name}: no record is left of {report.records:,}; {report.too_long:,} are longer than "
                f"{self._max_length} tokens (data.max_length)"
            )
        report.sequences, report.tokens = len(columns.lengths), sum(columns.lengths)
        return Part(columns.batch(), np.cumsum([0, *columns.sizes]), report, sizes, names_of(files))


def names_of(files: Sequence[DataFile]) -> tuple[str, ...]:
    """Return the names of files in metrics, all different. A file with the name of an earlier file also has its
    position.
    """
    wanted = [file.name or PurePath(file.path).name.partition(".")[0] or "file" for file in files]
    names = dict[str, None]()
    for place, name in enumerate(wanted):
        made = name
        while made in names or (made != name and made in wanted):
            made = f"{made}-{place}"
        names[made] = None
    return tuple(names)


def _reading(file: DataFile) -> str:
    """Return the options of a file, beside its bytes, that decide its records. Empty: all have their defaults."""
    usual = (file.format, file.layout, file.fields, file.weight) == ("auto", "auto", {}, None)
    return "" if usual else repr((file.format, file.layout, sorted(file.fields.items()), file.weight))


@frozen(eq=False)
class Part:
    """The units of some files, in order."""

    whole: Batch
    """All sequences, one unit after another."""
    starts: Any  # [units + 1], first sequence of each unit
    report: DataReport
    sizes: tuple[int, ...] = ()
    """Number of units of each file."""
    names: tuple[str, ...] = ()
    """Names of the files in metrics."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batches(self, size: int, first: int = 0, end: int | None = None) -> "list[Batch]":
        """Return the units from `first` to before `end` in order, in batches of `size`. The last may be smaller."""
        end = len(self) if end is None else end
        return [self.take(np.arange(i, min(i + size, end))) for i in range(first, end, size)]

    def files(self, size: int) -> "dict[str, list[Batch]]":
        """Return the units of each file that has any, by its name, in batches of `size`."""
        ends = np.cumsum(self.sizes).tolist()
        spans = zip(self.names, [0, *ends][:-1], ends, strict=True)
        return {name: self.batches(size, first, end) for name, first, end in spans if end > first}

    def take(self, units: Any) -> Batch:
        """Return the units at these positions. A position that appears twice gives two units."""
        sizes = self.starts[units + 1] - self.starts[units]
        rank = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        batch = self.whole.take(np.repeat(self.starts[units], sizes) + rank)
        owner = np.repeat(np.arange(len(units), dtype=np.int64), sizes)
        tokens = batch["tokens"].astype(np.int64)
        return batch.with_columns(tokens=tokens, unit=owner, group=owner, episode=np.arange(len(rank), dtype=np.int64))


class PreparedData:
    """Tokenised data. A batch is a function of step and size alone."""

    def __init__(
        self,
        train: Part,
        validation: Part,
        mixed: Mixture,
        status: Callable[[str], None] = lambda text: None,
        end: int | None = None,
        before: tuple[int, int] = (0, 0),
    ) -> None:
        """Take tokenised parts. `end`: units to train on in all; None: no end. `before`: the step, and the number of
        units, after which the run continues.
        """
        self._train, self._validation, self._mixture = train, validation, mixed
        self._end, self._before, self._told = end, before, False
        self.status = status
        """Called with the progress of slow work."""
        self._order = lru_cache(maxsize=2)(mixed.order)

    @property
    def report(self) -> DataReport:
        """Return the counts of the training records."""
        return self._train.report

    def __len__(self) -> int:
        return len(self._train)

    def batch(self, step: int, size: int) -> Batch:
        """Return the batch of a step (from 1) of `size` units. It may begin in one epoch and end in the next.

        The last batch of a run that states epochs may be smaller.
        """
        if self._end is None and size > len(self) and not self._told:
            self._told = True
            words = f"algorithm.batch_size is {size:,}, more than the {len(self):,} records of data.train"
            logger.info("%s: a step takes records several times", words)
            self.status(f"{words}: a step takes records several times")
        positions = np.arange(self._first(step, size), self.until(step, size))
        epochs, places = np.divmod(positions, len(self))
        units = [self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return self._train.take(np.concatenate(units))

    def epoch(self, step: int, size: int) -> float:
        """Return the number of passes over the data after a step, e.g. 1.5."""
        return self.until(step, size) / len(self)

    def steps(self, size: int) -> int:
        """Return the number of batches of `size` units. Raises `ValueError` unless the run states epochs."""
        if self._end is None:
            raise ValueError("data without an end has no number of steps")
        step, units = self._before
        return step + max(0, math.ceil((self._end - units) / size))

    def until(self, step: int, size: int) -> int:
        """Return the number of units used up to the end of a step."""
        if step == self._before[0]:
            return self._before[1]
        first = self._first(step, size)
        return first + size if self._end is None or first >= self._end else min(first + size, self._end)

    def _first(self, step: int, size: int) -> int:
        """Return the number of units used before a step."""
        before, units = self._before
        if step <= before:
            raise ValueError(
                f"the run goes on after step {before}; the batch of step {step} is of an earlier run attempt"
            )
        return units + (step - 1 - before) * size

    def validation(self, size: int) -> dict[str, list[Batch]]:
        """Return the validation data of each file, by its name in metrics, in order and in batches of `size` units. The
        last batch of a file may be smaller.
        """
        return self._validation.files(size)

    def with_columns(self, compute: Callable[[str, Part], Mapping[str, Any]]) -> "PreparedData":
        """Return the same data with further columns.

        `compute(name, part)` returns the columns of a part: each as long as its tokens or its sequences. The parts are
        `train` and `validation`.
        """
        parts = []
        for name, part in (("train", self._train), ("validation", self._validation)):
            columns = compute(name, part) if len(part) else {}
            parts.append(evolve(part, whole=part.whole.with_columns(**columns)))
        return PreparedData(parts[0], parts[1], self._mixture, self.status, self._end, self._before)


class Columns:
    """Collects sequences into flat columns, without one object per sequence."""

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
        """Return everything as one batch. Its tokens are int32, which halves the memory."""
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
