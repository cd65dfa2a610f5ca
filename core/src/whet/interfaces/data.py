"""Data files, as core and algorithms see them: files in, batches out. A position in the data is an integer.

A distribution offers the reader by an entry point of the group `whet.data`, as `package.module:instance`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from whet.config.sections import DataFile, DataSection
    from whet.data.batch import Batch
    from whet.data.chat import ChatTokenizer

Encode = Callable[[Mapping[str, Any], "ChatTokenizer"], Sequence[Mapping[str, Any]]]
"""(record, tokenizer) -> the sequences of one unit. Each has `tokens`, `loss_mask`, `prompt_length`, and possibly
further columns: arrays as long as its tokens, or single numbers. Raises `DataError` if the record cannot be used."""


@frozen
class Look:
    """What the beginning of a data file shows."""

    problem: str = ""
    """Why nothing of the file can be used, as far as its beginning shows."""
    recognised: str = ""
    """Format, layout and columns, in words. Empty: the file was not looked at, e.g. because it is on a hub."""
    doubt: str = ""
    """What is wrong with the first record, and where."""


class PreparedData(Protocol):
    """Tokenised data. A batch is a function of step and size alone."""

    status: Callable[[str], None]
    """Called with the progress of slow work."""

    def __len__(self) -> int:
        """Return the number of units of an epoch."""
        ...

    def batch(self, step: int, size: int) -> "Batch":
        """Return the batch of a step (from 1) of `size` units."""
        ...

    def epoch(self, step: int, size: int) -> float:
        """Return the number of passes over the data after a step, e.g. 1.5."""
        ...

    def steps(self, size: int) -> int:
        """Return the number of batches of `size` units. Raises `ValueError` unless the run states epochs."""
        ...

    def validation(self, size: int) -> "list[Batch]":
        """Return all validation data in order, in batches of `size` units. The last may be smaller."""
        ...

    def with_columns(self, compute: Callable[[str, Any], Mapping[str, Any]]) -> "PreparedData":
        """Return the same data with further columns. `compute(name, part)` returns those of `train` and `validation`:
        each as long as the part's tokens or its sequences.
        """
        ...


class OfflineData(Protocol):
    """The data files of a run, which are read when they are first needed."""

    def go_on(self, step: int, position: Mapping[str, int]) -> None:
        """Continue after a step, from the position that was saved with it."""
        ...

    def position(self, step: int, size: int) -> dict[str, int]:
        """Return the position in the data after a step of `size` units; a checkpoint holds it."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of what decides the batches: the files' contents and the options."""
        ...

    def prepare(self) -> PreparedData:
        """Read and tokenise all files, once. Raises `DataError` if too many records are malformed, or none is left."""
        ...


class DataReader(Protocol):
    """Reads the section `data` of a config."""

    def look(self, file: "DataFile", fields: Sequence[Sequence[str]], names: Mapping[str, str]) -> Look:
        """Look at the beginning of a file. `fields`: see `AlgorithmFacts.record_fields`; `names`: what the algorithm
        calls the columns, by their usual names.
        """
        ...

    def open(
        self, section: "DataSection", tokenizer: "ChatTokenizer", seed: int, max_length: int,
        status: Callable[[str], None], *, encode: Encode | None, names: Mapping[str, str], epochs: float | None,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> OfflineData:  # fmt: skip
        """Return the data of a run. `max_length` is in tokens, 0: no limit. `epochs`: passes over it; None: no end.

        Nothing is read yet. Tokenising tells its progress to `status`, and runs inside of `timed()`.
        """
        ...

    def records(self, epochs: float, records: int) -> int:
        """Return the number of records in `epochs` epochs of `records`."""
        ...
