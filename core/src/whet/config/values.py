"""Strict conversion of plain config values: a `bool` is no `int`, `'8'` is no `int`, but an `int` is a `float`."""

import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from whet.component import Problem
from whet.config.messages import found_words, nearest, path_segment, type_words, value_words

Hook = Callable[[Any, Any], Any]


class StructureError(Exception):
    """The problems of a part of the document, with paths relative to that part."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems


def refused(message: str) -> StructureError:
    """Return the error of a value, without a path so far."""
    return StructureError(Problem("", message))


def _strict(wanted: type) -> Hook:
    def check(value: object, _: Any) -> Any:
        if type(value) is not wanted:
            raise refused(f"wanted {type_words(wanted)}, found {found_words(value)}")
        return value

    return check


def _number(value: object, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refused(f"wanted a number, found {found_words(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise refused("wanted a number, found an integer that is too large") from None
    return number


def impossible(value: object, infinite: bool = False) -> Iterator[Problem]:
    """Find values that no field can hold: nan, integers beyond 64 bits, text that is not UTF-8 or has a NUL, and
    infinity unless the field takes it. Looks into lists and mappings, but not into nested attrs objects.
    """
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not infinite)):
        yield Problem("", f"wanted a finite number, found {value_words(value)}")
    elif isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST:
        yield Problem("", f"wanted an integer of at most 64 bits, found one of {value.bit_length()}")
    elif isinstance(value, (str, Path)) and (odd := _odd_character(str(value))):
        yield Problem("", f"wanted text without {odd}, found {found_words(str(value))}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (_below(key, problem) for problem in (*impossible(key), *impossible(item, infinite)))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield from (_below(index, problem) for problem in impossible(item, infinite))


def unusable_paths(value: object) -> Iterator[Problem]:
    """Find paths that no file system takes, in a path or in the items of a mapping or list."""
    if isinstance(value, str) and (reason := _fault_of_path(value)):
        yield Problem("", f"{reason}, found {found_words(value)}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (_below(key, problem) for problem in unusable_paths(item))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from (_below(index, problem) for problem in unusable_paths(item))


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


_LONGEST_NAME, _LONGEST_PATH = 255, 4000
_LARGEST = (1 << 63) - 1


def _odd_character(text: str) -> str:
    if "\0" in text:
        return "a NUL character"
    return "half of a character (a surrogate)" if _SURROGATES.search(text) else ""


_SURROGATES = re.compile("[\ud800-\udfff]")


def _below(key: object, problem: Problem) -> Problem:
    return Problem(".".join(filter(None, (path_segment(key), problem.path))), problem.message)


def _path(value: object, _: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise refused(f"wanted a path, found {found_words(value)}")
    return Path(value)


def enum_member(value: Any, wanted: type[Enum]) -> Enum:
    """Return the member that has this value and type."""
    for member in wanted:
        if member.value == value and type(member.value) is type(value):
            return member
    raise _not_one_of(value, [member.value for member in wanted])


def literal(value: object, wanted: Any) -> object:
    """Return the value if it is one of the choices and of the same type."""
    choices = typing.get_args(wanted)
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise _not_one_of(value, choices)
    return value


def _not_one_of(value: object, choices: Sequence[object]) -> StructureError:
    match = nearest(value, [choice for choice in choices if isinstance(choice, str)])
    hint = f" (did you mean {match!r}?)" if match else ""
    return refused(f"wanted one of {', '.join(map(value_words, choices))}, found {found_words(value)}{hint}")


PLAIN: dict[Any, Hook] = {
    bool: _strict(bool),
    int: _strict(int),
    str: _strict(str),
    type(None): _strict(type(None)),
    float: _number,
    Path: _path,
}


def is_literal(wanted: Any) -> bool:
    """Return whether a type is a `Literal`."""
    return typing.get_origin(wanted) is Literal


def is_union(wanted: Any) -> bool:
    """Return whether a type is a union, `| None` included."""
    return typing.get_origin(wanted) in (Union, types.UnionType)


def is_list(wanted: Any) -> bool:
    """Return whether a type is written as a YAML list."""
    origin = typing.get_origin(wanted) or wanted
    return (
        isinstance(origin, type)
        and issubclass(origin, (list, tuple, set, frozenset, Sequence))
        and origin not in (str, bytes)
    )


def is_mapping(wanted: Any) -> bool:
    """Return whether a type is written as a YAML mapping of any keys."""
    origin = typing.get_origin(wanted) or wanted
    return isinstance(origin, type) and issubclass(origin, Mapping)


def one_line(error: Exception) -> str:
    """Return the message of an error on one line. For attrs' validators, which have several arguments, only the
    message.
    """
    words = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(words.split()) or type(error).__name__
