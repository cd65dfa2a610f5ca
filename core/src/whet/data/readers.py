"""Read records from data files: JSON lines (also gzipped), JSON, Parquet, and data sets of the Hugging Face hub.

A row that is no record does not end the reading: it is given with the reason and its file and line, and whoever
reads decides how many are too many. No data set's own code is ever run.
"""

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import frozen

from whet.config.sections import DataFile
from whet.errors import DataError

LINES, WHOLE, TABLE = (".jsonl", ".jsonl.gz", ".ndjson"), (".json", ".json.gz"), (".parquet",)
SUFFIXES = (*LINES, *WHOLE, *TABLE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?", re.ASCII)
BOM = b"\xef\xbb\xbf"


@frozen
class Row:
    """One row of a data file."""

    where: str
    """File and line, e.g. `train.jsonl:12`."""
    record: Mapping[str, Any]
    """Empty where there is a problem."""
    problem: str = ""
    """Why the row is no record; empty: it is one."""


def read(file: DataFile) -> Iterator[Row]:
    """Give the rows of a file, folder or hub data set, in order. Raises `DataError` where it cannot be read at all."""
    rows = _rows(file)
    return itertools.islice(rows, file.limit) if file.limit else rows


def content_hash(file: DataFile) -> str:
    """Hash what `read` would read: the bytes of the file, or the hub data set's own fingerprint."""
    digest = blake2b(f"{file.limit}:".encode(), digest_size=16)
    path = find_file(file)
    if path is None:
        digest.update(str(_hub(file)._fingerprint).encode())
        return digest.hexdigest()
    with _opened(path, packed=True) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _rows(file: DataFile) -> Iterator[Row]:
    path = find_file(file)
    if path is None:
        hub = enumerate(_hub(file))
        return (_checked(f"{file.path}[{file.split}]:{number}", record) for number, record in hub)
    if path.name.endswith(TABLE):
        return _table(path)
    if path.name.endswith(LINES):
        return _lines(path)
    return _whole(path)


def find_file(file: DataFile) -> Path | None:
    """Find the file that is meant; None: a name on the hub. Raises `DataError` for what is neither."""
    path = Path(file.path).expanduser()
    if path.is_dir():
        found = [path / f"{file.split}{suffix}" for suffix in SUFFIXES if (path / f"{file.split}{suffix}").is_file()]
        if len(found) == 1:
            return found[0]
        if found:
            names = " and ".join(one.name for one in found)
            raise DataError(f"the folder {file.path} has {names} for the split {file.split!r}; wanted one of them")
        held = ", ".join(sorted(one.name for one in path.iterdir() if one.name.endswith(SUFFIXES))) or "no data file"
        raise DataError(f"the folder {file.path} has no file for the split {file.split!r}; it has {held}")
    if path.name.endswith(SUFFIXES):
        return path
    if path.exists() or not HUB_NAME.fullmatch(file.path):
        raise DataError(
            f"{file.path!r} is no data file: wanted a file that ends in {', '.join(SUFFIXES)}, a folder of such files, "
            "or a name on the Hugging Face hub"
        )
    return None


def _opened(path: Path, packed: bool = False) -> gzip.GzipFile | io.BufferedReader:
    try:
        return gzip.open(path) if path.name.endswith(".gz") and not packed else path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _lines(path: Path) -> Iterator[Row]:
    with _opened(path) as stream:
        for number, line in enumerate(_unbroken(stream, path), 1):
            text = line.removeprefix(BOM) if number == 1 else line
            if text.strip():
                yield _parsed(f"{path.name}:{number}", text)


def _unbroken(stream: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Give lines, and name the file where it turns out to be damaged."""
    try:
        yield from stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or was cut off: {error}") from error


def _parsed(where: str, text: bytes) -> Row:
    try:
        return _checked(where, json.loads(text.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Row(where, {}, f"not UTF-8 at byte {error.start}")
    except RecursionError:
        return Row(where, {}, "nested too deeply")
    except ValueError as error:
        return Row(where, {}, f"not JSON: {error}")


def _checked(where: str, record: object) -> Row:
    if isinstance(record, Mapping):
        return Row(where, record)
    return Row(where, {}, f"a {type(record).__name__}, wanted an object with named fields")


def _whole(path: Path) -> Iterator[Row]:
    """Read a `.json` file: a list of records, or (as is common on the hub) a record on each line."""
    with _opened(path) as stream:
        content = b"".join(_unbroken(stream, path)).removeprefix(BOM).strip()
    if not content.startswith(b"["):
        for number, line in enumerate(io.BytesIO(content), 1):
            if line.strip():
                yield _parsed(f"{path.name}:{number}", line)
        return
    try:
        records = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a JSON list of records: {error}") from error
    for number, record in enumerate(records, 1):
        yield _checked(f"{path.name}[{number}]", record)


def _table(path: Path) -> Iterator[Row]:
    parquet = _optional("pyarrow.parquet", f"{path} is a Parquet file")
    try:
        number = 0
        with _opened(path) as stream:
            for block in parquet.ParquetFile(stream).iter_batches():
                for record in block.to_pylist():
                    number += 1
                    yield Row(f"{path.name}:row {number}", record)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _hub(file: DataFile) -> Any:
    datasets = _optional("datasets", f"{file.path!r} is no local file, so it is taken for a name on the hub")
    load: Callable[..., Any] = datasets.load_dataset
    try:
        return load(file.path, file.subset or None, split=file.split)
    except Exception as error:  # whatever the library, the network or the data set raises
        raise DataError(
            f"the data set {file.path!r} (split {file.split!r}) cannot be loaded from the hub: {error}. If a local "
            "file is meant: it does not exist"
        ) from error


def _optional(module: str, why: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{why}, and reading it needs {module.split('.')[0]}: pip install 'whet[hub]'") from error
