"""Plain values of a config, taken strictly: a `bool` is no `int`, `'8'` is no `int`, and an `int` is a `float`."""

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from whet.component import Problem
from whet.config.words import found_words, nearest, type_words, value_words

Hook = Callable[[Any, Any], Any]


class StructureError(Exception):
    """The problems of a part of the document, with paths from there."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems


def refused(message: str) -> StructureError:
    """Make the error of a value without any path yet."""
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
    if math.isnan(number):
        raise refused("wanted a number, found nan")
    return number


def _path(value: object, _: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise refused(f"wanted a path, found {found_words(value)}")
    return Path(value)


def enum_member(value: Any, wanted: type[Enum]) -> Enum:
    """Take the value of a member."""
    for member in wanted:
        if member.value == value and type(member.value) is type(value):
            return member
    raise _not_one_of(value, [member.value for member in wanted])


def literal(value: object, wanted: Any) -> object:
    """Take one of the values, of its very type."""
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
    """Whether a type is a `Literal`."""
    return typing.get_origin(wanted) is Literal


def is_union(wanted: Any) -> bool:
    """Whether a type is a union, `| None` included."""
    return typing.get_origin(wanted) in (Union, types.UnionType)


def is_list(wanted: Any) -> bool:
    """Whether a type is written as a YAML list."""
    origin = typing.get_origin(wanted) or wanted
    return (
        isinstance(origin, type)
        and issubclass(origin, (list, tuple, set, frozenset, Sequence))
        and origin not in (str, bytes)
    )


def is_mapping(wanted: Any) -> bool:
    """Whether a type is written as a YAML mapping of any keys."""
    origin = typing.get_origin(wanted) or wanted
    return isinstance(origin, type) and issubclass(origin, Mapping)


def one_line(error: Exception) -> str:
    """Give what an error says, on one line; of attrs' validators the message alone."""
    words = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
    return " ".join(words.split()) or type(error).__name__
