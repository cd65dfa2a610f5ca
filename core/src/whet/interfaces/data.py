"""The contract of a data reader: it reads data files and returns batches. A position in the data is an integer.

A distribution offers its reader as an entry point `package.module:instance` of the group `whet.data`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from whet.config.sections import DataFile, DataSection
    from whet.data.batch import Batch
    from whet.interfaces.chat import Tokenizer

Encode = Callable[[Mapping[str, Any], "Tokenizer"], Sequence[Mapping[str, Any]]]
"""(record, tokenizer) -> the sequences of one unit. Each sequence has `tokens`, `loss_mask` and `prompt_length`. It may
have further columns: an array with one entry for each token, or a single number. The function raises `DataError` if the
record cannot be used."""


@frozen
class Look:
    """The result of a look at the beginning of a data file."""

    problem: str = ""
    """The reason why the whole file cannot be used. Empty: the beginning shows no such reason."""
    recognised: str = ""
    """Format, layout and columns, in words. Empty: nothing is known of the file."""
    doubt: str = ""
    """The mistake in the first record, and its place. Empty: none was found."""


class PreparedData(Protocol):
    """Tokenised data. A batch depends only on the step and the size."""

    status: Callable[[str], None]
    """Called with the progress of slow work."""

    def __len__(self) -> int:
        """Return the number of units in an epoch."""

    def batch(self, step: int, size: int) -> "Batch":
        """Return the batch of a step: `size` units. Steps are counted from 1."""

    def epoch(self, step: int, size: int) -> float:
        """Return the number of passes over the data that are done after a step, e.g. 1.5."""

    def steps(self, size: int) -> int:
        """Return the number of batches of `size` units. Raise `ValueError` if the run has no number of epochs."""

    def validation(self, size: int) -> "dict[str, list[Batch]]":
        """Return the validation data of each file, by its name in metrics, in order, in batches of `size`."""

    def with_columns(self, compute: Callable[[str, Any], Mapping[str, Any]]) -> "PreparedData":
        """Return the same data with further columns.

        `compute(name, part)` returns the new columns of one part; `name` is `train` or `validation`. A column has one
        entry for each token of the part, or one for each sequence.
        """


class OfflineData(Protocol):
    """The data files of a run. They are read by `begin`, or when they are first needed."""

    def go_on(self, step: int, position: Mapping[str, int]) -> None:
        """Continue after a step, from the position that was saved with this step."""

    def position(self, step: int, size: int) -> dict[str, int]:
        """Return the position in the data after a step of `size` units. A checkpoint saves this position."""

    def fingerprint(self) -> str:
        """Return a hash of the files' contents and the options. Together these decide the batches."""

    def begin(self) -> None:
        """Begin to read and tokenise all files in the background. `prepare` waits for the end of it."""

    def prepare(self) -> PreparedData:
        """Read and tokenise all files, and return the data. Later calls do not read the files again.

        Raise `DataError` if too many records are malformed, or if no record is left.
        """


class DataReader(Protocol):
    """Reads the section `data` of a config."""

    def look(self, file: "DataFile", fields: Sequence[Sequence[str]], names: Mapping[str, str]) -> Look:
        """Read the beginning of a file, and return what was found.

        `fields`: see `AlgorithmFacts.record_fields`. `names`: maps the usual name of a column to the algorithm's name.
        """

    def open(
        self, section: "DataSection", tokenizer: "Tokenizer", seed: int, max_length: int,
        status: Callable[[str], None], *, encode: Encode | None, names: Mapping[str, str], epochs: float | None,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> OfflineData:  # fmt: skip
        """Return the data of a run, without reading any file yet.

        `max_length`: the longest sequence in tokens; 0: no limit. `epochs`: number of passes over the data; None: no
        end. Tokenisation calls `status` with its progress, and runs inside the context `timed()`.
        """

    def records(self, epochs: float, records: int) -> int:
        """Return the number of records in `epochs` epochs, if one epoch has `records` records."""
