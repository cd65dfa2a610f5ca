"""How types and values are named in messages and references: `an integer`, `the text '8'`."""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

import attrs

from whet.component import Kind, Selection

_PLAIN: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path", type(None): "null",
}  # fmt: skip
_SINGULAR = {"losses": "loss", "advantages": "advantage estimator", "sandboxes": "sandbox"}


def kind_word(kind: Kind) -> str:
    """Return the word for one component of a kind, e.g. `loss`."""
    return _SINGULAR.get(kind, kind.removesuffix("s"))


def a_kind(kind: Kind) -> str:
    """Return the word for one component of a kind with its article, e.g. `an algorithm`."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind_word(kind)}"


def type_words(wanted: Any, kind: Kind | None = None) -> str:
    """Return what a type requires as text, e.g. `a list of text`. A selection in it is a component of the kind."""
    if wanted is Selection:
        return a_kind(kind) if kind else "a component"
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted in _PLAIN:
        return _PLAIN[wanted]
    if origin is Literal:
        return f"one of {', '.join(map(value_words, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(type_words(argument, kind) for argument in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of {type_words(arguments[0])} to {type_words(arguments[1], kind)}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        items = [type_words(argument, kind) for argument in arguments if argument is not Ellipsis]
        if len(items) == len(arguments) > 1 and len(set(items)) == 1:
            return f"a list of {len(items)} {_plural(items[0])}"
        return f"a list of {' and '.join(_plural(item) for item in items)}"
    if not isinstance(wanted, type):
        return "any value"
    if issubclass(wanted, Enum):
        return f"one of {', '.join(value_words(member.value) for member in wanted)}"
    if attrs.has(wanted) or issubclass(wanted, Mapping):
        return "a mapping"
    return "a list" if issubclass(wanted, (list, tuple, set, frozenset)) else "any value"


def _plural(words: str) -> str:
    """Return the plural, without an article: `lists of text` for `a list of text`."""
    article, _, rest = words.partition(" ")
    noun, _, tail = rest.partition(" ")
    noun += "es" if noun.endswith("ss") else "s"
    return f"{noun} {tail}".strip() if article in ("a", "an") else words


def value_words(value: object) -> str:
    """Return a value as the config file would have it, short and on one line, e.g. `'auto'`, `true`, `null`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def found_words(value: object) -> str:
    """Return what was found as text, e.g. `the text '8'`, `a list`."""
    if isinstance(value, str):
        return f"the text {value_words(value)}"
    if isinstance(value, bool) or value is None:
        return value_words(value)
    if isinstance(value, (int, float)):
        return f"the number {value!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"{type(value).__name__} {value_words(value)}"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant. None: no known word is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def choice_words(word: object, known: Iterable[str]) -> str:
    """Return a hint: ` (did you mean 'x'?)`, or else the known names: `; known: a, b`."""
    names = list(known)
    match = nearest(word, names)
    if match is not None:
        return f" (did you mean {match!r}?)"
    return f"; known: {', '.join(sorted(names))}" if names else ""


def path_segment(key: object) -> str:
    """Return a key of a mapping as a part of a path. Keys that are no plain words are quoted."""
    text = str(key) if isinstance(key, (str, int)) else repr(key)
    if text and text.isprintable() and "." not in text and len(text) <= 60:
        return text
    return value_words(text)
