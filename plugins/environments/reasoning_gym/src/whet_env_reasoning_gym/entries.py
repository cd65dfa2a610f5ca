"""Entries of reasoning-gym as plain data, which crosses processes: tuples, keys that are no text and sets are marked.

    {"numbers": (3, 4), "edges": {1: "a"}}
    {"numbers": {"~tuple": [3, 4]}, "edges": {"~dict": [[1, "a"]]}}

A scorer must get the entry that the question came from. It is not made again, because some data sets make another one
in another process.
"""

import enum
from collections.abc import Mapping
from typing import Any

from whet.errors import DataError

TUPLE, SET, PAIRS = "~tuple", "~set", "~dict"


def packed(value: Any) -> Any:
    """Return an entry as dicts with keys of text, lists, text, numbers and None. Raises `DataError` for anything else.

    NumPy's numbers become Python's, and members of an enumeration become their values.
    """
    if isinstance(value, enum.Enum):
        return packed(value.value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {PAIRS: [[packed(key), packed(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [packed(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [packed(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {SET: sorted((packed(item) for item in value), key=repr)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return packed(value.tolist())
    raise DataError(f"an entry of reasoning-gym holds {value!r:.80}, which cannot cross to the process of its scorer")


def unpacked(value: Any) -> Any:
    """Return the entry that `packed` took."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, items),) = value.items()
        if mark == TUPLE:
            return tuple(unpacked(item) for item in items)
        if mark == SET:
            return {unpacked(item) for item in items}
        if mark == PAIRS:
            return {unpacked(key): unpacked(item) for key, item in items}
    return {key: unpacked(item) for key, item in value.items()}
