"""Readers of tool calls: one for each kind of format. A response is hostile text: all that is not a call stays text.

Each reader has `calls(text, tools)`, which returns where the content ends, and the calls. It raises `ValueError` if a
call is damaged.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Protocol

from attrs import frozen

from whet.data.messages import Call, Tools
from whet_chat.values import read_json, read_pairs, read_value, skip

_SEPARATORS = re.compile(r"[;,\s]*")
_NAME = re.compile(r"\s*([\w.\-/:]{1,200})")
_PYTHON_NAME = re.compile(r"\s*([A-Za-z_][\w.]{0,199})\s*\(")
_LEAD = re.compile(r"\s*(?:<\|python_tag\|>\s*)?")
LONGEST_GAP = 200
"""Most characters between the name of a tool and its arguments."""


class Reader(Protocol):
    """Reads the calls of one format."""

    @property
    def frame(self) -> "Frame":
        """Return the text around calls."""

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """Return where the content before the calls ends, and the calls, without ids. Raises `ValueError`."""


@frozen
class Frame:
    """The text around calls."""

    marker: str
    """Text directly before each call. Empty: a response with calls has nothing else in it."""
    opening: tuple[str, ...] = ()
    """Tags and words between the content and the first marker."""
    leading: bool = False
    """Whether the prompt ends with the first marker already."""

    def starts(self, text: str) -> Iterator[int]:
        """Yield the position after each marker."""
        if self.leading:
            yield 0
        at = text.find(self.marker) if self.marker else -1
        while at >= 0:
            yield at + len(self.marker)
            at = text.find(self.marker, at + len(self.marker))

    def content_end(self, text: str) -> int:
        """Return where the content before the first call ends."""
        if not self.marker or self.leading:
            return 0
        before = text[: max(0, text.find(self.marker))].rstrip()
        for word in reversed(self.opening):
            before = before.removesuffix(word).rstrip()
        return len(before)


@frozen
class JsonCalls:
    """Calls with JSON: one object holds name and arguments, or the name stands before the arguments."""

    frame: Frame
    name: str | None = None
    """The key of the name. Empty: the only key is the name. None: the name stands before the arguments."""
    arguments: str = ""
    """The key of the arguments."""
    prefix: str = ""
    """Text before a name that stands before its arguments, as `functions.`."""
    middle: str = ""
    """The last tag between such a name and its arguments."""

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        return self.frame.content_end(text), list(self._calls(text))

    def _calls(self, text: str) -> Iterator[Call]:
        if not self.frame.marker:
            found = _LEAD.match(text)
            yield from self._values(text, found.end() if found else 0, whole=True)[0]
            return
        end = 0
        for at in self.frame.starts(text):
            if at < end:  # a marker within an argument
                continue
            if self.name is not None:
                calls, end = self._values(text, at)
                yield from calls
                continue
            call, end = self._named(text, at)
            yield call

    def _values(self, text: str, at: int, whole: bool = False) -> tuple[list[Call], int]:
        """Return the calls of one or more JSON values, each a call or a list of calls, and where they end."""
        calls = list[Call]()
        while True:
            value, at = read_json(text, at)
            calls += [self._call(one) for one in (value if isinstance(value, list) else [value])]
            following = _SEPARATORS.match(text, at)
            after = following.end() if following else at
            if after >= len(text) or (not whole and text[after] != "{"):
                return calls, at
            at = after

    def _call(self, value: Any) -> Call:
        if not isinstance(value, dict):
            raise ValueError("a call is no object")
        if self.name == "":
            ((name, arguments),) = value.items()
            return made(name, arguments)
        arguments = value.get(self.arguments)
        if arguments is None and self.arguments in ("arguments", "parameters"):
            # Models were trained on both words, e.g. Llama 3 by its own reports.
            arguments = value.get("parameters" if self.arguments == "arguments" else "arguments")
        return made(value.get(self.name or ""), arguments)

    def _named(self, text: str, at: int) -> tuple[Call, int]:
        at = skip(text, at)
        at += len(self.prefix) if text.startswith(self.prefix, at) else 0
        found = _NAME.match(text, at)
        if found is None:
            raise ValueError("a call has no name")
        begin = text.find(self.middle, found.end()) if self.middle else found.end()
        begin = text.find("{", begin + len(self.middle)) if begin >= 0 else begin
        if not 0 <= begin - found.end() <= LONGEST_GAP:
            raise ValueError("a call has no arguments")
        value, end = read_json(text, begin)
        return made(found[1].partition(":")[0], value), end


@frozen
class TaggedCalls:
    """Calls in which each argument has tags of its own, around its name and its value."""

    frame: Frame
    name_end: str
    """Text after the name of the tool. Empty: white space, or the next tag."""
    open: str
    """Text before the name of an argument."""
    middle: tuple[str, str]
    """Text between the name of an argument and its value: how it begins, and how it ends."""
    text_middle: str
    """The text in place of `middle` for a text argument, if it shows the type. Empty: it does not."""
    close: str
    """Text after the value of an argument."""
    end: str
    """Text after the last argument."""
    lines: bool
    """Whether a value stands on lines of its own."""

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        found, end = list[Call](), 0
        for at in self.frame.starts(text):
            if at >= end:
                call, end = self._one(text, at, tools)
                found.append(call)
        return self.frame.content_end(text), found

    def _one(self, text: str, at: int, tools: Tools) -> tuple[Call, int]:
        marks = [text.find(mark, at) for mark in (self.open, self.end)]
        begin = min((mark for mark in marks if mark >= 0), default=-1)
        name_end = text.find(self.name_end, at) if self.name_end else begin
        if begin < 0 or name_end < 0 or max(begin, name_end) - at > 2 * LONGEST_GAP:
            raise ValueError("a call has no end")
        name = text[at : min(begin, name_end)].strip()
        types, arguments, at = types_of(tools).get(name, {}), dict[str, Any](), begin
        while text.startswith(self.open, at):
            key, value, at = self._argument(text, at + len(self.open), types)
            arguments[key] = value
            at = skip(text, at)
        if not text.startswith(self.end, at):
            raise ValueError("a call has no end")
        return made(name, arguments), at + len(self.end)

    def _argument(self, text: str, at: int, types: dict[str, str]) -> tuple[str, Any, int]:
        first, last = self.middle
        key_end = text.find(first, at)
        begin = text.find(last, key_end + len(first)) if last and key_end >= 0 else key_end + len(first)
        if key_end < 0 or begin < 0 or begin - at > 2 * LONGEST_GAP:
            raise ValueError("an argument has no name")
        begin += len(last)
        end = text.find(self.close, begin)
        if end < 0:
            raise ValueError("an argument has no end")
        key, value = text[at:key_end].strip(), text[begin:end]
        if self.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        said = text[key_end:begin]
        is_text = said == self.text_middle if self.text_middle else types.get(key) == "string"
        return key, value if is_text else typed(value), end + len(self.close)


@frozen
class PythonCalls:
    """A list of calls in Python's syntax: `[f(x=1), g()]`."""

    frame: Frame

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        if self.frame.marker:
            found = [call for at in self.frame.starts(text) for call in self._list(text, at)[0]]
            return self.frame.content_end(text), found
        lead = _LEAD.match(text)
        found, end = self._list(text, lead.end() if lead else 0)
        if text[end:].strip():
            raise ValueError("there is more than calls")
        return 0, found

    def _list(self, text: str, at: int) -> tuple[list[Call], int]:
        at, found = skip(text, at), list[Call]()
        in_list = text.startswith("[", at)
        at += in_list
        while name := _PYTHON_NAME.match(text, at):
            arguments, at = read_pairs(text, name.end(), ")", "=")
            found.append(made(name[1], arguments))
            at = skip(text, at)
            at += text.startswith(",", at)
        at = skip(text, at)
        if not found or (in_list and not text.startswith("]", at)):
            raise ValueError("a list of calls has no end")
        return found, at + in_list


@frozen
class BracesCalls:
    """Calls with bare keys, as `call:f{x:1}`."""

    frame: Frame
    quote: str
    """The quotation mark around text."""

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        found, end = list[Call](), 0
        for at in self.frame.starts(text):
            if at < end:
                continue
            name = _NAME.match(text, at)
            if name is None or not text.startswith("{", name.end()):
                raise ValueError("a call has no arguments")
            arguments, end = read_pairs(text, name.end() + 1, "}", ":", self.quote)
            found.append(made(name[1], arguments))
        return self.frame.content_end(text), found


@frozen
class ElementCalls:
    """Calls in which each argument is an element with its name, as `<x>1</x>`, and lists are elements `item`."""

    frame: Frame
    name_end: str
    """Text after the name of the tool."""
    mark: str
    """Text before each tag of an argument."""
    end: str
    """Text after the last argument."""

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        found, end = list[Call](), 0
        for at in self.frame.starts(text):
            if at < end:
                continue
            begin = text.find(self.name_end, at)
            if not 0 <= begin - at <= LONGEST_GAP:
                raise ValueError("a call has no name")
            arguments, end = self._children(text, begin + len(self.name_end), 0)
            if not text.startswith(self.end, end):
                raise ValueError("a call has no end")
            name = text[at:begin]
            types = types_of(tools).get(name, {})
            whole = arguments if isinstance(arguments, dict) else {}
            kept = {k for k, v in whole.items() if types.get(k) == "string" or not isinstance(v, str)}
            found.append(made(name, {k: v if k in kept else typed(v) for k, v in whole.items()}))
        return self.frame.content_end(text), found

    def _children(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """Return the elements at a position as a dict, or a list if all of them are items, and where they end."""
        keys, values = list[str](), list[Any]()
        at = skip(text, at)
        while text.startswith(f"{self.mark}<", at) and not text.startswith(f"{self.mark}</", at):
            begin = at + len(self.mark) + 1
            close = text.find(">", begin, begin + LONGEST_GAP)
            if close < 0 or depth > 20:
                raise ValueError("an argument has no name")
            key = text[begin:close]
            tail = f"{self.mark}</{key}>"
            inner, end = self._children(text, close + 1, depth + 1)
            if not inner:
                end = text.find(tail, close + 1)
                inner = text[close + 1 : end]
                inner = typed(inner) if depth and end >= 0 else inner
            if end < 0 or not text.startswith(tail, end):
                raise ValueError("an argument has no end")
            keys.append(key)
            values.append(inner)
            at = skip(text, end + len(tail))
        return (values if keys and set(keys) == {"item"} else dict(zip(keys, values, strict=True))), at


def made(name: Any, arguments: Any) -> Call:
    """Return a call without an id. Raises `ValueError` if the name or the arguments are invalid."""
    if isinstance(arguments, str):
        arguments = read_json(arguments, 0)[0]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or arguments that are no object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("arguments are nested too deeply") from error
    (name + text).encode()  # raises for half a character, which no tokenizer accepts
    return Call("", name, text)


def typed(text: str) -> Any:
    """Return the value of an argument without quotes. Text that is not a value is returned as text."""
    for read in (read_json, read_value):
        value = _whole(read, text)
        if value is not _NOTHING and (not isinstance(value, float) or math.isfinite(value)):
            return value
    return text


_NOTHING = object()


def _whole(read: Callable[[str, int], tuple[Any, int]], text: str) -> Any:
    try:
        value, end = read(text, 0)
    except ValueError:
        return _NOTHING
    return value if not text[end:].strip() else _NOTHING


@lru_cache(maxsize=64)
def types_of(tools: Tools) -> dict[str, dict[str, str]]:
    """Return the type of each parameter of each tool, as its schema has it. A parameter without one is left out."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = json.loads(tool)
        function = function.get("function", function)
        properties = (function.get("parameters") or {}).get("properties")
        if isinstance(properties, dict):
            found[str(function.get("name"))] = {
                key: one["type"] for key, one in properties.items()
                if isinstance(one, dict) and isinstance(one.get("type"), str)
            }  # fmt: skip
    return found
