"""The reader of data files that core finds: see `whet.interfaces.data.DataReader`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from whet.errors import DataError
from whet.interfaces.data import Encode, Look

if TYPE_CHECKING:
    from whet.config.sections import DataFile, DataSection
    from whet.interfaces.chat import Tokenizer
    from whet_data.offline import OfflineData


class Reader:
    """Reads files of records by `whet_data.offline`, which is imported when a file is first looked at."""

    def look(self, file: "DataFile", fields: Sequence[Sequence[str]], names: Mapping[str, str]) -> Look:
        """Look at the beginning of a file."""
        from whet_data.layouts import recognise
        from whet_data.readers import find_file

        try:
            found = find_file(file)
            if found is None:
                named = "" if file.format == "hub" else f"there is no file or folder {file.path!r} here, so it is "
                return Look("", f"{named}a data set of the hub")
            if not found.exists():
                return Look(f"there is no file {file.path!r}")
            seen = recognise(file, names)
        except DataError as error:
            return Look(str(error))
        if not seen.rows:
            return Look(f"{file.path!r} holds no record")
        if seen.missing:
            return Look(f"`fields` names the column {seen.missing[0]!r}; the file has {', '.join(seen.columns)}")
        reasons = [row.problem or _lacking(row.record, fields) for row in seen.rows]
        doubt = f"{seen.rows[0].where}: {reasons[0]}" if reasons[0] else ""
        if all(reasons):
            return Look(f"none of the first {len(reasons)} records can be used; {doubt}", doubt=doubt)
        return Look("", seen.words, doubt)

    def open(
        self, section: "DataSection", tokenizer: "Tokenizer", seed: int, max_length: int,
        status: Callable[[str], None], *, encode: Encode | None, names: Mapping[str, str], epochs: float | None,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> "OfflineData":  # fmt: skip
        """Return the data of a run."""
        from whet_data.offline import OfflineData

        return OfflineData(
            section, tokenizer, seed, max_length, status, encode=encode, names=names, epochs=epochs, timed=timed
        )

    def records(self, epochs: float, records: int) -> int:
        """Return the number of records in `epochs` epochs of `records`."""
        from whet_data.offline import records_of

        return records_of(epochs, records)


def _lacking(record: Mapping[str, Any], fields: Sequence[Sequence[str]]) -> str:
    """Return which columns a record lacks, in words."""
    from whet_data.layouts import found_words

    if not fields or any(all(record.get(name) is not None for name in names) for names in fields):
        return ""
    wanted = ", or ".join(" and ".join(f"`{name}`" for name in names) for names in fields)
    return f"it has the columns {found_words(record)}; wanted {wanted}; `fields` says what they are called in this file"


reader = Reader()
