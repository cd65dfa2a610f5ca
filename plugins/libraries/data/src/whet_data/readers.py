"""Read records from data files: JSON lines, JSON, CSV, TSV (all also gzipped), Parquet, folders that `datasets` saved,
and data sets of the Hugging Face hub.

A malformed row does not end the reading: it is yielded with its file, line and reason, and the caller decides how many
are too many. A data set's own code is never run.
"""

import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import frozen

from whet.config.sections import HELD_OUT, DataFile
from whet.errors import DataError, in_words
from whet_data.tables import DELIMITERS, delimiter_of, read_table

FORMATS = {
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    "json": (".json", ".json.gz"),
    "csv": (".csv", ".csv.gz"),
    "tsv": (".tsv", ".tsv.gz"),
    "parquet": (".parquet",),
}
"""File name endings by format."""
SUFFIXES = tuple(itertools.chain(*FORMATS.values()))
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that mark a folder saved by `datasets`: one data set, or several splits."""
SAVED_INFO = "dataset_info.json"
"""A second marker of a saved data set, because other programs use the name of `SAVED` too."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?", re.ASCII)
BOM = b"\xef\xbb\xbf"


@frozen
class Row:
    """One row of a data file."""

    where: str
    """File and line, e.g. `train.jsonl:12`."""
    record: Mapping[str, Any]
    """The record. Empty if there is a problem."""
    problem: str = ""
    """Why the row is no record. Empty: it is one."""


def read(file: DataFile) -> Iterator[Row]:
    """Return the rows of a file, folder or hub data set, in order. Raises `DataError` if it cannot be read at all.

    Data without splits is read as a whole, whichever split is asked for: the tasks of an environment may be one file.
    """
    rows = _rows(file)
    return itertools.islice(rows, file.limit) if file.limit else rows


def content_hash(file: DataFile) -> str:
    """Return a hash of what `read` would read: the bytes of the file, or the hub data set's own fingerprint."""
    digest = blake2b(f"{file.limit}:".encode(), digest_size=16)
    path = find_file(file)
    if path is None:
        digest.update(str(_hub(file)[1]._fingerprint).encode())
    for each in sorted(path.glob("*.arrow")) if path and path.is_dir() else [path] if path else []:
        with _opened(each, packed=True) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _rows(file: DataFile) -> Iterator[Row]:
    path = _place(file)
    if path is None:
        split, hub = _hub(file)
        rows = enumerate(hub.with_format(None))
        return (_checked(f"{file.path}[{split}]:{number}", record) for number, record in rows)
    match format_of(file, path):
        case "saved":
            return _saved(path)
        case "parquet":
            return _table(path)
        case "csv" | "tsv" as kind:
            return _delimited(path, "\t" if kind == "tsv" else "")
        case "jsonl":
            return _lines(path)
    return _whole(path)


def format_of(file: DataFile, path: Path | None) -> str:
    """Return the format of a file that `find_file` found: a key of `FORMATS`, `saved` or `hub`."""
    if path is None:
        return "hub"
    if path.is_dir():
        return "saved"
    own = next((name for name, suffixes in FORMATS.items() if path.name.endswith(suffixes)), "json")
    return own if file.format in ("auto", "saved", "hub") else file.format


def format_words(file: DataFile) -> str:
    """Return the format of a file as text for people, e.g. `CSV with semicolons`, and its split where it has some."""
    path = find_file(file)
    words = _format_words(file, path)
    if path is not None and path.is_file() and path == Path(file.path).expanduser():
        idle = [f"`subset` {file.subset!r}"] * bool(file.subset)
        idle += [f"`split` {file.split!r}"] * (file.split not in ("", "train", HELD_OUT))
        return f"{words}, one file, so it is read whole whatever {' and '.join(idle)} say" if idle else words
    if path is None or path == Path(file.path).expanduser():
        return words
    return f"{words}, split {path.name if path.is_dir() else _stem(path)!r}"


def _format_words(file: DataFile, path: Path | None) -> str:
    kind = format_of(file, path)
    if path is not None and kind == "csv":
        with _opened(path) as stream:
            delimiter = DELIMITERS[delimiter_of(path, stream)]
        return "CSV" if delimiter == "comma" else f"CSV with {delimiter}s"
    words = {"jsonl": "JSON lines", "json": "JSON", "tsv": "TSV", "parquet": "Parquet"}
    return words.get(kind, "a saved data set" if kind == "saved" else "a data set of the hub")


def find_file(file: DataFile) -> Path | None:
    """Return the path of a data file or of a saved data set's folder. None: it is a name on the hub. Raises
    `DataError`, also if the config names a split or a subset and a folder has none.
    """
    path, named = _place(file), Path(file.path).expanduser()
    if path is None or not named.is_dir():  # one file is read whole, which `format_words` tells
        return path
    if file.subset:
        raise DataError(f"{file.path} has no subsets, and `subset` is {file.subset!r}; leave `subset` out")
    if path == named and file.split not in ("", "train", HELD_OUT):
        what = "a saved data set of its own, which has no splits"
        raise DataError(f"{file.path} is {what}, and `split` is {file.split!r}; leave `split` out")
    return path


def _place(file: DataFile) -> Path | None:
    if file.format == "hub":
        return None
    path = Path(file.path).expanduser()
    if path.is_dir():
        return _in_folder(file, path)
    if file.format == "saved":
        raise DataError(f"there is no folder {file.path!r}; wanted one that `save_to_disk` wrote (format: saved)")
    if path.name.endswith(SUFFIXES) or (file.format != "auto" and path.is_file()):
        return path
    if path.exists() or not HUB_NAME.fullmatch(file.path) or file.format != "auto":
        raise DataError(
            f"{file.path!r} is no data file: wanted a file that ends in {', '.join(SUFFIXES)}, a folder of such files, "
            "or a name on the Hugging Face hub; `format` names the format of a file whose name does not"
        )
    return None


def _in_folder(file: DataFile, path: Path) -> Path:
    if (path / SAVED_SPLITS).is_file():
        splits = sorted(one.name for one in path.iterdir() if (one / SAVED).is_file())
        if (split := _split(file, splits)) in splits:
            return path / split
        raise DataError(f"the saved data set {file.path} has no split {split!r}; it has {', '.join(splits) or 'none'}")
    if (path / SAVED).is_file() and (path / SAVED_INFO).is_file():
        return path
    if file.format == "saved":
        raise DataError(f"the folder {file.path} has no {SAVED} or {SAVED_SPLITS}, so `save_to_disk` did not write it")
    suffixes = FORMATS.get(file.format, SUFFIXES)
    files = sorted(one for one in path.iterdir() if one.name.endswith(suffixes) and one.is_file())
    split = _split(file, sorted({_stem(one) for one in files}))
    found = [path / f"{split}{suffix}" for suffix in suffixes if path / f"{split}{suffix}" in files]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(one.name for one in found)
        raise DataError(f"the folder {file.path} has {names} for the split {split!r}; wanted one of them")
    held = ", ".join(sorted(one.name for one in path.iterdir() if one.name.endswith(SUFFIXES))) or "no data file"
    raise DataError(f"the folder {file.path} has no file for the split {split!r}; it has {held}")


def _split(file: DataFile, splits: Collection[str]) -> str:
    """Return the split to read of data that has these. Raises `DataError` if it must be named, and is not."""
    if file.split != HELD_OUT:
        return file.split or "train"
    found = [name for name in ("validation", "test") if name in splits]
    if len(found) == 1:
        return found[0]
    raise DataError(
        f"{file.path} has the splits {', '.join(splits) or 'none'}; wanted one of `validation` and `test` to validate "
        "on, or a key `split` that names the split"
    )


def _stem(path: Path) -> str:
    """Return the name of a file without the ending that tells its format."""
    return next(path.name.removesuffix(suffix) for suffix in SUFFIXES if path.name.endswith(suffix))


def _opened(path: Path, packed: bool = False) -> gzip.GzipFile | io.BufferedReader:
    try:
        return gzip.open(path) if path.name.endswith(".gz") and not packed else path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _lines(path: Path) -> Iterator[Row]:
    with _opened(path) as stream:
        first = True
        for number, line in enumerate(_unbroken(stream, path), 1):
            text = line.removeprefix(BOM) if number == 1 else line
            if not text.strip():
                continue
            row = _parsed(f"{path.name}:{number}", text)
            opens = text.lstrip().startswith(b"[") and text.rstrip().endswith((b"[", b"{", b","))
            if first and opens and row.problem.startswith("not JSON"):
                raise DataError(f"{path} is a JSON list over several lines; name it .json, or set format: json")
            first = False
            yield row


def _unbroken(stream: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield lines. Raise `DataError` with the file's name if the file is damaged."""
    try:
        yield from stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or was cut off: {error}") from error


def _parsed(where: str, text: bytes) -> Row:
    try:
        return _checked(where, json.loads(text.decode("utf-8")), halves=bool(_HALF.search(text)))
    except UnicodeDecodeError as error:
        return Row(where, {}, f"not UTF-8 at byte {error.start}")
    except RecursionError:
        return Row(where, {}, "nested too deeply")
    except ValueError as error:
        return Row(where, {}, f"not JSON: {error}")


def _checked(where: str, record: object, halves: bool = False) -> Row:
    """Return a parsed record as a row. `halves`: the text may hold surrogates, which no tokenizer takes."""
    if halves and _is_halved(record):
        return Row(where, {}, "half of a character (a surrogate such as \\ud800), wanted whole ones")
    if isinstance(record, Mapping):
        return Row(where, record)
    return Row(where, {}, f"a {type(record).__name__}, wanted an object with named fields")


_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escaped surrogate. Two that belong together are one character."""


def _is_halved(record: object) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _whole(path: Path) -> Iterator[Row]:
    """Yield the rows of a `.json` file: a list of records, or (as is common on the hub) a record on each line."""
    with _opened(path) as stream:
        content = b"".join(_unbroken(stream, path)).removeprefix(BOM).strip()
    if not content.startswith(b"["):
        _refuse_one_object(content, path)
        for number, line in enumerate(io.BytesIO(content), 1):
            if line.strip():
                yield _parsed(f"{path.name}:{number}", line)
        return
    try:
        records = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a JSON list of records: {error}") from error
    halves = bool(_HALF.search(content))
    for number, record in enumerate(records, 1):
        yield _checked(f"{path.name}[{number}]", record, halves)


def _refuse_one_object(content: bytes, path: Path) -> None:
    """Raise `DataError` if the content is one JSON object over several lines."""
    if not _parsed("", io.BytesIO(content).readline()).problem.startswith("not JSON"):
        return
    if not _parsed("", content).problem.startswith("not JSON"):
        raise DataError(
            f"{path} is one JSON object over several lines; wanted a list of records, or a record on each line"
        )


def _delimited(path: Path, delimiter: str) -> Iterator[Row]:
    with _opened(path) as stream:
        for line in read_table(stream, path, delimiter):
            yield Row(f"{path.name}:{line.number}", line.record, line.problem)


def _table(path: Path) -> Iterator[Row]:
    parquet = _optional("pyarrow.parquet", f"{path} is a Parquet file")
    try:
        number = 0
        with _opened(path) as stream:
            for block in parquet.ParquetFile(stream).iter_batches():
                for record in _values(block, path):
                    number += 1
                    yield Row(f"{path.name}:row {number}", record)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _values(block: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Return the records of a part of a Parquet file. Raises `DataError` that names the column if Python has no such
    value, as for a date after the year 9999.
    """
    columns = dict[str, list[Any]]()
    for name, column in zip(block.schema.names, block.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except Exception as error:  # any type: pyarrow and the types of the values decide
            raise DataError(
                f"{path}: the column {name!r} has a value that cannot be read: {error}; correct it, or leave out the "
                "column"
            ) from error
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _saved(path: Path) -> Iterator[Row]:
    datasets = _optional("datasets", f"{path} is a data set that `datasets` saved")
    load: Callable[..., Any] = datasets.load_from_disk
    try:
        for number, record in enumerate(load(str(path)).with_format(None)):
            yield _checked(f"{path.name}:{number}", record)
    except Exception as error:  # any type: the library decides what a damaged folder raises
        raise DataError(f"the saved data set {path} cannot be read: {in_words(error)}") from error


def _hub(file: DataFile) -> tuple[str, Any]:
    """Return the split of a hub data set that is to be read, and its records."""
    datasets = _optional("datasets", f"{file.path!r} is no local file, so it is taken for a name on the hub")
    load: Callable[..., Any] = datasets.load_dataset
    split = None if file.split == HELD_OUT else _split(file, ())
    try:
        found = load(file.path, file.subset or None, split=split)
    except Exception as error:  # any type: from the library, the network or the data set
        named = f" (split {split!r})" if split else ""
        raise DataError(
            f"the data set {file.path!r}{named} cannot be loaded from the hub: {error}. If a local file is meant: it "
            "does not exist"
        ) from error
    if split is None:
        split = _split(file, found)
        found = found[split]
    return split, found


def _optional(module: str, why: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{why}, and reading it needs {module.split('.')[0]}: pip install 'whet[hub]'") from error
