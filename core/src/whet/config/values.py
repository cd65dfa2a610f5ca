"""What is wrong with a plain value of a config: a `bool` is no `int`, `'8'` is no `int`, but an `int` is a `float`.

Refused everywhere: nan, integers beyond 64 bits, text that is not UTF-8 or has a NUL, and infinity unless the field
takes it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.config.messages import found_words, nearest, type_words, value_words

PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (int, float), str: (str,), Path: (str, Path), type(None): (type(None),),
}  # fmt: skip
"""The types of a value that each plain type takes."""
_LARGEST = (1 << 63) - 1
_LONGEST_NAME, _LONGEST_PATH = 255, 4000
_SURROGATES = re.compile("[\ud800-\udfff]")


def fault(value: object, wanted: Any, metadata: Mapping[str, Any]) -> str:
    """Return what is wrong with a value of a plain type, in a field with this metadata. Empty: nothing."""
    if not isinstance(value, PLAIN[wanted]) or (isinstance(value, bool) and wanted is not bool):
        return f"wanted {type_words(wanted)}, found {found_words(value)}"
    if wanted is float:
        return _fault_of_number(value, bool(metadata.get("infinite")))
    if wanted is int and isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST:
        return f"wanted an integer of at most 64 bits, found one of {value.bit_length()}"
    if not isinstance(value, str):
        return ""
    if "\0" in value or _SURROGATES.search(value):
        odd = "a NUL character" if "\0" in value else "half of a character (a surrogate)"
        return f"wanted text without {odd}, found {found_words(value)}"
    path = any(metadata.get(word) for word in ("path", "names_path", "writes"))
    return f"{reason}, found {found_words(value)}" if path and (reason := _fault_of_path(value)) else ""


def _fault_of_number(value: Any, infinite: bool) -> str:
    try:
        number = float(value)
    except OverflowError:
        return "wanted a number, found an integer that is too large"
    usable = math.isfinite(number) or (infinite and math.isinf(number))
    return "" if usable else f"wanted a finite number, found {value_words(number)}"


def _fault_of_path(path: str) -> str:
    names = path.encode("utf-8", "replace").split(b"/")
    if max(map(len, names)) > _LONGEST_NAME:
        return f"wanted a path whose names have at most {_LONGEST_NAME} bytes"
    if sum(map(len, names)) + len(names) > _LONGEST_PATH:
        return f"wanted a path of at most {_LONGEST_PATH} bytes"
    try:
        Path(path).expanduser()
    except RuntimeError:
        return f"wanted a path whose first part is the home of a user, as {names[0].decode()!r:.40} is not"
    return ""


def fault_of_choice(value: object, choices: Sequence[object]) -> str:
    """Return what is wrong with a value that must be one of the choices, and of the same type. Empty: nothing."""
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return ""
    match = nearest(value, [choice for choice in choices if isinstance(choice, str)])
    hint = f" (did you mean {match!r}?)" if match else ""
    return f"wanted one of {', '.join(map(value_words, choices))}, found {found_words(value)}{hint}"
