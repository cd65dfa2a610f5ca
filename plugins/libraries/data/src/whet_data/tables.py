"""Read records from CSV and TSV files of any origin: the standard library's reader, plus checks that it lacks.

header row            names of the columns
other rows            one record each; a row that does not fit the header is reported with its line and skipped
quote without an end  absorbs all rows after it, so it ends the reading
"""

import csv
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from whet.errors import DataError

LONGEST_CELL = 64 << 20
"""In characters. A longer cell means a quote that was never closed."""
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}
_ENCODINGS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_UNDECODED = re.compile("[\udc80-\udcff]")


@frozen
class Line:
    """One row of a table, the header excluded."""

    number: int
    """Line of the file on which the row begins, from 1."""
    record: dict[str, str | None]
    """Cells by column. None: an empty cell."""
    problem: str = ""
    """Why the row is no record. Empty: it is one."""


def read_table(stream: io.BufferedIOBase, path: Path, delimiter: str = "") -> Iterator[Line]:
    """Yield the rows of a table. Without a delimiter, use the one that splits the header into most columns.

    Raises `DataError` if the file cannot be read further: it has no header, is damaged, or a quote in it never ends.
    """
    with _readable(path):
        yield from _Rows(_decoded(stream), path, delimiter)


def delimiter_of(path: Path, stream: io.BufferedIOBase) -> str:
    """Return the delimiter that `read_table` would use. Raises `DataError` as it does."""
    with _readable(path):
        return _Rows(_decoded(stream), path, "").delimiter


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise `DataError` if a file turns out to be damaged."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or was cut off: {error}") from error
    except UnicodeError as error:
        raise DataError(f"{path} is not UTF-16, which its first bytes say it is: {error}") from error


def _decoded(stream: io.BufferedIOBase) -> io.TextIOWrapper:
    """Return a text stream of UTF-8, or of UTF-16 if a byte order mark says so. Undecodable bytes become surrogates."""
    buffered = io.BufferedReader(stream) if not isinstance(stream, io.BufferedReader) else stream
    begin = buffered.peek(3)[:3]
    encoding = next((name for mark, name in _ENCODINGS if begin.startswith(mark)), "utf-8")
    errors = "strict" if encoding == "utf-16" else "surrogateescape"
    return io.TextIOWrapper(buffered, encoding, errors=errors, newline="")


class _Rows:
    def __init__(self, text: io.TextIOWrapper, path: Path, delimiter: str) -> None:
        self._path = path
        first = text.readline(LONGEST_CELL)
        self.delimiter = delimiter or max(DELIMITERS, key=lambda each: _columns(first[:65_536], each))
        self._reader = csv.reader(_chain(first, text), delimiter=self.delimiter, strict=True)
        self.columns = self._header()

    def _header(self) -> list[str]:
        try:
            cells = self._next() or []
        except csv.Error as error:
            raise DataError(f"{self._path} has a header that cannot be read as {self._kind}: {error}") from error
        columns = [cell.strip() for cell in cells]
        named = Counter(filter(None, columns))
        if not named:
            raise DataError(f"{self._path} has no header: wanted the names of the columns in its first row")
        if any("\0" in name or _UNDECODED.search(name) for name in named):
            raise DataError(f"{self._path} has a header that is no UTF-8 text: {self._quoted(list(named))}")
        if twice := [name for name, count in named.items() if count > 1]:
            raise DataError(f"{self._path} has two columns with the name {twice[0]!r:.60}; wanted a name for each")
        return columns

    def __iter__(self) -> Iterator[Line]:
        while True:
            number = self._reader.line_num + 1
            try:
                cells = self._next()
            except csv.Error as error:
                yield Line(number, {}, f"not {self._kind}: {error}")
                continue
            if cells is None:
                return
            if cells:
                yield self._line(number, cells)

    def _next(self) -> list[str] | None:
        """Return the next row. None: the end."""
        began = self._reader.line_num + 1
        before = csv.field_size_limit(LONGEST_CELL)  # the module has one limit for the whole process
        try:
            return next(self._reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error) or "field larger" in str(error):
                raise DataError(
                    f"{self._path}: a quote in the row that begins on line {began} is never closed, so that all rows "
                    "behind it belong to one cell; close it, or double quotes inside of cells"
                ) from error
            raise
        finally:
            csv.field_size_limit(before)

    def _line(self, number: int, cells: list[str]) -> Line:
        if len(cells) != len(self.columns):
            words = f"the row has {len(cells)} cells, wanted {len(self.columns)}: {self._quoted(self.columns)}"
            return Line(number, {}, words)
        for name, cell in zip(self.columns, cells, strict=True):
            if "\0" in cell:
                return Line(number, {}, f"the column {name!r:.60} has a NUL character; wanted text")
            if _UNDECODED.search(cell):
                return Line(number, {}, f"the column {name!r:.60} is not UTF-8: {cell!r:.60}; save the file as UTF-8")
        # A column without a name holds the row numbers that other programs write.
        named: Any = ((name, cell or None) for name, cell in zip(self.columns, cells, strict=True) if name)
        return Line(number, dict(named))

    @property
    def _kind(self) -> str:
        return "TSV" if self.delimiter == "\t" else "CSV"

    def _quoted(self, names: list[str]) -> str:
        return f"{', '.join(names)!r:.120}"


def _columns(line: str, delimiter: str) -> int:
    """Return the number of columns that a delimiter splits a header into."""
    return len(next(csv.reader([line], delimiter=delimiter), []))


def _chain(first: str, text: io.TextIOWrapper) -> Iterator[str]:
    if first:
        yield first
    while line := text.readline(LONGEST_CELL):
        yield line
