"""Values as models write them in calls: JSON, Python literals, and braces with bare keys. Parsed, never evaluated."""

import json
import re
from typing import Any

DEEPEST = 40
"""Most levels of nesting of a value."""
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_KEY = re.compile(r"[^\s:,{}\[\]()]{1,200}")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile("|".join(_WORDS))
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_DECODER = json.JSONDecoder()


def skip(text: str, at: int) -> int:
    """Return the position after white space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after white space, and its end. Raises `ValueError`."""
    try:
        return _DECODER.raw_decode(text, skip(text, at))
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error


def read_value(text: str, at: int, quote: str = "", depth: int = 0) -> tuple[Any, int]:
    """Return the JSON value or Python literal at a position, and its end. Raises `ValueError`.

    `quote` is a further mark that begins and ends text.
    """
    at = skip(text, at)
    if depth > DEEPEST:
        raise ValueError("a value is nested too deeply")
    for mark in filter(None, (quote, '"', "'")):
        if text.startswith(mark, at):
            return _text(text, at + len(mark), mark, raw=mark == quote)
    letter = text[at : at + 1]
    if letter == "{":
        return _object(text, at + 1, quote, depth)
    if letter in ("[", "("):
        return _list(text, at + 1, "]" if letter == "[" else ")", quote, depth)
    if word := _WORD.match(text, at):
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None or not number[0].strip("+-._"):
        raise ValueError(f"there is no value at {text[at : at + 20]!r}")
    plain = number[0].replace("_", "")
    return (int(plain) if plain.lstrip("+-").isdecimal() else float(plain)), number.end()


def read_pairs(
    text: str, at: int, end: str, between: str, quote: str = "", depth: int = 0
) -> tuple[dict[str, Any], int]:
    """Return `key BETWEEN value` pairs up to `end`, and where they end. Keys may be bare. Raises `ValueError`."""
    found: dict[str, Any] = {}
    while not text.startswith(end, at := skip(text, at)):
        key, at = _key(text, at, between, quote)
        found[key], at = read_value(text, _after(text, at, between), quote, depth + 1)
        at = _next(text, at, end)
    return found, at + len(end)


def _object(text: str, at: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    return read_pairs(text, at, "}", ":", quote, depth)


def _list(text: str, at: int, end: str, quote: str, depth: int) -> tuple[list[Any], int]:
    found = []
    while not text.startswith(end, at := skip(text, at)):
        value, at = read_value(text, at, quote, depth + 1)
        found.append(value)
        at = _next(text, at, end)
    return found, at + 1


def _key(text: str, at: int, between: str, quote: str) -> tuple[str, int]:
    if any(text.startswith(mark, at) for mark in filter(None, (quote, '"', "'"))):
        return read_value(text, at, quote)
    found = _KEY.match(text, at)
    if found is None:
        raise ValueError(f"there is no key at {text[at : at + 20]!r}")
    key = found[0].partition(between)[0]
    return key, at + len(key)


def _after(text: str, at: int, mark: str) -> int:
    at = skip(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark!r} is missing at {text[at : at + 20]!r}")
    return at + len(mark)


def _next(text: str, at: int, end: str) -> int:
    """Return the position of the next item or of the end: a comma stands between items."""
    at = skip(text, at)
    return at if text.startswith(end, at) else _after(text, at, ",")


def _text(text: str, at: int, mark: str, raw: bool) -> tuple[str, int]:
    end = text.find(mark, at)
    while not raw and end >= 0 and _escaped(text, at, end):
        end = text.find(mark, end + 1)
    if end < 0:
        raise ValueError("text has no end")
    found = text[at:end]
    return (found if raw or "\\" not in found else _ESCAPE.sub(_unescaped, found)), end + len(mark)


def _escaped(text: str, begin: int, at: int) -> bool:
    """Return whether an odd number of backslashes stands before a position."""
    first = at
    while first > begin and text[first - 1] == "\\":
        first -= 1
    return (at - first) % 2 == 1


def _unescaped(found: re.Match[str]) -> str:
    mark = found[1]
    return chr(int(mark[1:], 16)) if mark[0] in "ux" and len(mark) > 1 else _ESCAPES.get(mark, mark)
