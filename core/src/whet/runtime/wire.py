"""The format of values in messages between processes: a JSON header and raw buffers beside it, never pickle.

    encode({"tokens": array, "step": 3})
        [b'{"value":{"tokens":{"~":"array","at":0},"step":3},"arrays":[["int64",128]]}', <the array's own memory>]

These values can be sent: builtins (dicts with string keys), NumPy arrays of booleans, integers and floats, and the
records of core in `RECORDS`. Lists are packed: a list of one kind of record is sent by column, and a list of flat
arrays as one buffer with lengths, so that a hundred completions take a few buffers. The receiver checks all it reads.

A decoded message is never much larger than its bytes. Only packed lists write a long value in short form, all
repetitions in a message have a common limit, and each buffer is used once. Between processes that do not trust each
other lists are not packed (`packed=False`), and the number of values has a limit.
"""

import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import attrs
import numpy as np

from whet.data.bounded import loads
from whet.errors import WhetError

Buffer = bytes | bytearray | memoryview

TAG: Final = "~"
"""The key of a JSON object that stands for something other than a plain dict."""
DTYPES: Final = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    )
}  # fmt: skip
_SENT: Final = {
    "whet.data.messages": ("Text", "Image", "Call", "Message"),
    "whet.data.records": (
        "Task", "Sampling", "Request", "Completion", "Progress", "Reply", "Trajectory", "SpanReward", "Episode", "Group"
    ),
    "whet.data.batch": ("Batch",), "whet.data.metrics": ("Metric",), "whet.data.spans": ("Span",),
    "whet.data.model_info": ("ModelInfo",), "whet.component": ("AdapterInfo", "Spec"),
    "whet.interfaces.weights": ("TransferSpec",), "whet.interfaces.workers": ("WorkerRank",),
    "whet.interfaces.axes": ("RankCoordinates",),
}  # fmt: skip
RECORDS: Final = {name: module for module, names in _SENT.items() for name in names}
"""The records that can be sent, with their modules. A module is imported when its first record is sent or read."""
_PLAIN = frozenset({type(None), bool, int, float, str})
_BUILTINS: tuple[Any, ...] = (int, float, str, bytes)
_MOST_REPEATS: Final = 1 << 20
"""The limit of repeated values in all packed lists of a message together."""
_ROW_REPEATS: Final = 8
"""The repeated values that a row counts as, where no column of the rows is written value by value in the message."""
_MOST_VALUES: Final = 1 << 18
"""The limit of values in a message that is not packed: about 50 MB."""
_WANTED = "only builtins (dicts with string keys), NumPy arrays of bool, int or float, and records of core cross"


class WireError(WhetError):
    """A value cannot be sent to another process, or a message that arrived is damaged."""


def encode(value: Any, *, packed: bool = True) -> list[Buffer]:
    """Return the buffers of a value, the header first. Contiguous arrays are not copied.

    With `packed=False` each value is written by itself, for receivers that do not trust this process. Raises
    `WireError`, which says where in the value the part is that cannot be sent.
    """
    writer = _Writer(packed)
    try:
        document = {"value": writer.tree(value), "arrays": writer.arrays}
        return [json.dumps(document, separators=(",", ":")).encode("ascii"), *writer.buffers]
    except _UnsendableError:
        where, what = _find_unsendable(value, "the value") or ("the value", type(value).__name__)
        raise WireError(f"{where} is {what}; {_WANTED}") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise WireError(f"a value cannot cross: {error}") from error


def decode(buffers: Sequence[Buffer], *, records: bool = True, packed: bool = True) -> Any:
    """Return the value of buffers that `encode` made. Arrays are views of the buffers, writable if the buffers are.

    For messages from untrusted code, `records=False` refuses records, and `packed=False` refuses packed lists and more
    than `_MOST_VALUES` values. Raises `WireError`.
    """
    try:
        header = json.loads(bytes(buffers[0])) if packed else loads(buffers[0], _MOST_VALUES)
        arrays = [_array(spec, buffer) for spec, buffer in zip(header["arrays"], buffers[1:], strict=True)]
        return _Reader(arrays, records, packed).value(header["value"])
    except WireError:
        raise
    except Exception as error:  # the edge: each record's constructor raises errors of its own
        raise WireError(f"a message is damaged: {type(error).__name__}: {error}") from error


class _UnsendableError(Exception):
    pass


class _Writer:
    """Turns a value into a JSON tree, and collects the buffers to which the tree refers."""

    def __init__(self, packed: bool = True) -> None:
        self.arrays: list[list[Any]] = []
        self.buffers: list[Buffer] = []
        self._packs, self._repeats = packed, _MOST_REPEATS

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value)
        if _record_name(kind) is not None:
            return self.record(value)
        return self.tree(_as_builtin(value))

    def mapping(self, value: Mapping[str, Any]) -> dict[str, Any]:
        if not all(type(key) is str for key in value):
            raise _UnsendableError
        if TAG in value:
            return {TAG: "dict", "keys": list(value), "values": self.items(list(value.values()))}
        return {key: item if type(item) in _PLAIN else self.tree(item) for key, item in value.items()}

    def tuple(self, value: tuple[Any, ...]) -> dict[str, Any]:
        return {TAG: "tuple", "of": self.items(value)}

    def bytes(self, value: Buffer) -> dict[str, Any]:
        return {TAG: "bytes", "at": self.append(np.asarray(memoryview(value).cast("B")))}

    def array(self, value: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {TAG: "array", "at": self.append(value)}

    def append(self, value: np.ndarray[Any, Any]) -> int:
        dtype, name = _known_dtype(value.dtype)
        value = np.asarray(value, dtype, order="C")
        self.arrays.append([name, *value.shape])
        self.buffers.append(value.reshape(-1).view(np.uint8).data)
        return len(self.arrays) - 1

    def record(self, value: Any) -> dict[str, Any]:
        name = type(value).__name__
        return {TAG: name, "of": self.items([getattr(value, field) for field in _record(name)[1]])}

    def items(self, values: Sequence[Any]) -> Any:
        """Return the values as a JSON list, or as a packed list where all of them are of one kind."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return list(values)
        if self._packs and len(kinds) == 1 and len(values) > 1:
            packed = self.packed(values, kinds.pop())
            if packed is not None:
                return packed
        return [value if type(value) in _PLAIN else self.tree(value) for value in values]

    def packed(self, values: Sequence[Any], kind: type) -> dict[str, Any] | None:
        first = values[0]
        if all(value is first for value in values):
            if len(values) > self._repeats:
                return None
            self._repeats -= len(values)
            return {TAG: "repeat", "of": self.tree(first), "count": len(values)}
        if kind is np.ndarray:
            if all(value.ndim == 1 and value.dtype == first.dtype for value in values):
                return {TAG: "ragged", "at": self.append(np.concatenate(values)), "lengths": list(map(len, values))}
        elif kind is tuple:
            if first and all(len(value) == len(first) for value in values):
                columns = [self.items(column) for column in zip(*values, strict=True)]
                return self.rows({TAG: "rows", "of": "tuple", "columns": columns}, len(values))
        elif kind is dict:
            keys = list(first)
            if keys and TAG not in first and all(list(value) == keys for value in values):
                if not all(type(key) is str for key in keys):
                    raise _UnsendableError
                columns = [self.items([value[key] for value in values]) for key in keys]
                return self.rows({TAG: "rows", "of": "dict", "keys": keys, "columns": columns}, len(values))
        elif (name := _record_name(kind)) is not None:
            columns = [self.items([getattr(value, field) for value in values]) for field in _record(name)[1]]
            return self.rows({TAG: "rows", "of": name, "columns": columns}, len(values))
        return None

    def rows(self, tree: dict[str, Any], count: int) -> dict[str, Any] | None:
        """Return the packed rows `tree`, or None where the message would pass its limit of repeated values."""
        self._repeats -= 0 if _backed(tree["columns"]) else _ROW_REPEATS * count
        return tree if self._repeats >= 0 else None


def _backed(columns: Sequence[Any]) -> bool:
    """Return whether a column is written value by value, so that the rows' size in bytes grows with their number."""
    return any(type(column) is list or column[TAG] == "ragged" for column in columns)


_WRITERS: dict[type, Callable[[_Writer, Any], Any]] = {
    list: _Writer.items, tuple: _Writer.tuple, dict: _Writer.mapping, np.ndarray: _Writer.array,
    np.memmap: _Writer.array, bytes: _Writer.bytes, bytearray: _Writer.bytes, memoryview: _Writer.bytes,
}  # fmt: skip


class _Reader:
    """Turns a JSON tree back into the value, and checks every tagged object."""

    def __init__(self, arrays: list[np.ndarray[Any, Any]], records: bool, packed: bool) -> None:
        self.arrays, self.records = arrays, records
        self._unused, self._repeats = set(range(len(arrays))), _MOST_REPEATS
        self._packed = packed

    def value(self, tree: Any) -> Any:
        if type(tree) is list:
            return self.items(tree)
        if type(tree) is not dict:
            return tree
        match tag := tree.get(TAG):
            case None:
                return {key: self.value(item) for key, item in tree.items()}
            case "array":
                return self.array(tree["at"])
            case "bytes":
                return self.array(tree["at"]).tobytes()
            case "tuple":
                return tuple(self.items(tree["of"]))
            case "dict":
                return self.dictionary(tree["keys"], self.items(tree["values"]))
            case "repeat" | "ragged" | "rows":
                return self.items(tree)
        return self.record(tag)(*self.items(tree["of"]))

    def items(self, tree: Any) -> list[Any]:
        """Return the list that `_Writer.items` wrote."""
        if type(tree) is list:
            return [self.value(item) if type(item) in (dict, list) else item for item in tree]
        if not self._packed:
            raise WireError(f"a message holds the packed list {tree[TAG]!r:.40}, which must not cross")
        match tree[TAG]:
            case "repeat":
                count = tree["count"]
                if type(count) is not int or count < 0:
                    raise WireError(f"a message is damaged: {count!r:.40} repetitions")
                self.spend(count)
                return [self.value(tree["of"])] * count
            case "ragged":
                return _split(self.array(tree["at"]), tree["lengths"])
            case "rows":
                return self.rows(tree)
        raise WireError(f"a message is damaged: {tree[TAG]!r:.40} stands where a list should")

    def rows(self, tree: dict[str, Any]) -> list[Any]:
        columns = [self.items(column) for column in tree["columns"]]
        if not columns:
            raise WireError("a message is damaged: rows without columns")
        if not _backed(tree["columns"]):
            self.spend(_ROW_REPEATS * len(columns[0]))
        if tree["of"] == "dict":
            return [self.dictionary(tree["keys"], row) for row in zip(*columns, strict=True)]
        rows = zip(*columns, strict=True)
        if tree["of"] == "tuple":
            return list(rows)
        make = self.record(tree["of"])
        return [make(*row) for row in rows]

    def dictionary(self, keys: Any, values: Iterable[Any]) -> dict[str, Any]:
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise WireError("a message is damaged: the keys of a dict are no strings")
        return dict(zip(keys, values, strict=True))

    def array(self, at: Any) -> np.ndarray[Any, Any]:
        if type(at) is not int or at not in self._unused:
            raise WireError(f"a message is damaged: there is no buffer {at!r:.40}, or it stands in two places")
        self._unused.remove(at)
        return self.arrays[at]

    def spend(self, repeats: int) -> None:
        """Count repeated values, which are written only once in the message. Raises `WireError` beyond the limit."""
        self._repeats -= repeats
        if self._repeats < 0:
            raise WireError(f"a message is damaged: it unpacks to more than {_MOST_REPEATS:,} repeated values")

    def record(self, name: Any) -> Callable[..., Any]:
        if not self.records or type(name) is not str or name not in RECORDS:
            raise WireError(
                f"a message holds the record {name!r:.60}, which {'may' if self.records else 'must'} not cross"
            )
        return _record(name)[0]


@cache
def _known_dtype(found: np.dtype[Any]) -> tuple[np.dtype[Any], str]:
    """Return the dtype in which arrays of a dtype are sent, and its name. Cached, because NumPy is slow to name it."""
    if found.name not in DTYPES:
        raise _UnsendableError
    return DTYPES[found.name], found.name


def _record_name(kind: type) -> str | None:
    """Return the name under which a class of records is sent, or None for any other class."""
    return kind.__name__ if RECORDS.get(kind.__name__) == kind.__module__ else None


_KNOWN: dict[str, tuple[type, tuple[str, ...]]] = {}


def _record(name: str) -> tuple[type, tuple[str, ...]]:
    """Return the class of a record and the names of its fields, in order."""
    if name not in _KNOWN:
        cls = getattr(importlib.import_module(RECORDS[name]), name)
        _KNOWN[name] = cls, tuple(field.name for field in attrs.fields(cls))
    return _KNOWN[name]


def _as_builtin(value: Any) -> Any:
    """Return a NumPy number, a mapping or an instance of a builtin's subclass as the builtin itself."""
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return value.item()
    for builtin in _BUILTINS:
        if isinstance(value, builtin):
            return builtin(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise _UnsendableError


def _array(spec: Any, buffer: Buffer) -> np.ndarray[Any, Any]:
    name, *shape = spec
    if name not in DTYPES or not all(type(size) is int and size >= 0 for size in shape):
        raise WireError(f"a message is damaged: there are no arrays of {spec!r:.80}")
    dtype, found = DTYPES[name], memoryview(buffer).nbytes
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != found:
        raise WireError(f"a message is damaged: {spec!r:.80} needs {wanted} bytes, not {found}")
    return np.ndarray(shape, dtype, buffer)


def _split(flat: np.ndarray[Any, Any], lengths: Any) -> list[np.ndarray[Any, Any]]:
    if type(lengths) is not list or not all(type(n) is int and n >= 0 for n in lengths):
        raise WireError("a message is damaged: lengths that are no counts")
    if flat.ndim != 1 or sum(lengths) != len(flat):
        raise WireError(f"a message is damaged: lengths of {sum(lengths)} in all for {flat.size} values")
    return [flat[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def _find_unsendable(value: Any, path: str) -> tuple[str, str] | None:
    """Return the path and the kind of the first part of a value that cannot be sent, or None where all can be."""
    kind = type(value)
    if kind in _PLAIN or kind in (bytes, bytearray, memoryview):
        return None
    if isinstance(value, np.ndarray):
        return None if value.dtype.name in DTYPES else (path, f"an array of {value.dtype.name}")
    if isinstance(value, list | tuple) and kind in (list, tuple):
        inside: Iterable[tuple[str, Any]] = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, Mapping):
        bad = next((key for key in value if type(key) is not str), None)
        if bad is not None:
            return path, f"a dict with the key {bad!r:.40}"
        inside = ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif _record_name(kind) is not None:
        inside = ((f"{path}.{name}", getattr(value, name)) for name in _record(kind.__name__)[1])
    else:
        try:
            _as_builtin(value)
        except _UnsendableError:
            return path, f"a {kind.__module__}.{kind.__qualname__}"
        return None
    return next((found for where, item in inside if (found := _find_unsendable(item, where))), None)
