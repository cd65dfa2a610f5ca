"""Typed Python functions as tools: the schema comes from the signature and the docstring, and arguments are checked.

    def convert(amount: float, to: Literal["km", "miles"] = "km") -> float:
        '''Convert a length.

        :param amount: The length in metres.
        :param to: The unit.
        '''

Types are those of msgspec: str, int, float, bool, None, list, dict, Literal, Enum, Optional, dataclasses, TypedDict,
attrs classes, and `Annotated[int, msgspec.Meta(ge=0)]` or `Annotated[int, "words for the model"]`.
"""

import asyncio
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from whet.component import resolve
from whet.errors import PluginError
from whet_env_tools.functions import Episode
from whet_env_tools.hosted.answer import Answer

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:\s*$")
_FIELD = re.compile(r"^\s*:param\s+(?:[\w\[\], ]+\s)?(\w+)\s*:\s*(.*)$")
_ARGUMENT = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class Functions:
    """The functions of an order, by address."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._tools = {tool.name: tool for tool in map(function_tool, addresses)}
        self._thread = ThreadPoolExecutor(1)
        self._stuck = False

    def described(self) -> list[dict[str, Any]]:
        """Return name, description and parameters of each function, and whether it waits, i.e. is async."""
        return [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "waits": tool.waits,
                "keeps": bool(tool.episode),
            }
            for tool in self._tools.values()
        ]

    async def call(self, tool: str, arguments: dict[str, Any], episode: dict[str, Any]) -> Answer:
        """Call a function. An exception of the function becomes an answer that the model reads."""
        found = self._tools[tool]
        given = Episode(**episode)
        try:
            checked = found.checked(arguments)
        except (msgspec.ValidationError, RecursionError) as error:
            return Answer(f"Wrong arguments: {error}", error=True)
        if found.episode:
            checked[found.episode] = given
        try:
            if found.waits:
                value = await found.function(**checked)
            else:
                self._stuck = True
                loop = asyncio.get_running_loop()
                value, ended = await loop.run_in_executor(self._thread, _called, found.function, checked)
                self._stuck = False
                if ended is not None:
                    raise ended
            text = as_text(value)
        except (asyncio.CancelledError, MemoryError):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the function's own
            self._stuck = False
            return Answer(f"{type(error).__name__}: {error}", error=True)
        try:
            return Answer(text, state=json.loads(json.dumps(given.state)) if found.episode else None)
        except (TypeError, ValueError) as error:
            raise PluginError(f"episode.state of the function {tool} cannot be written as JSON: {error}") from error

    async def recovers(self, seconds: float) -> bool:
        """Return whether the thread is free. A function that hangs in the thread cannot be stopped."""
        return not self._stuck


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, StopIteration | None]:
    """Return what a function returns, and the error that no future can hold."""
    try:
        return function(**arguments), None
    except StopIteration as error:
        return None, error


@frozen
class FunctionTool:
    """A function as a tool."""

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    waits: bool
    """Whether it is async."""
    episode: str
    """The parameter that gets the episode. Empty: none."""
    arguments: type[msgspec.Struct]
    """The arguments as a class, against which calls are checked."""

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them. Raises `msgspec.ValidationError`."""
        made = msgspec.convert(arguments, self.arguments)
        return {name: getattr(made, name) for name in self.arguments.__struct_fields__ if name in arguments}


def function_tool(address: str) -> FunctionTool:
    """Return the function at an address, `module:name` or `path/to/file.py:name`. Raises `PluginError`."""
    module, _, name = address.rpartition(":")
    target = f"file:{Path(module).expanduser().absolute()}:{name}" if module.endswith(".py") else address
    function = resolve(target)
    if not callable(function):
        raise PluginError(f"{address!r} is {function!r:.80}, wanted a function")
    try:
        return _tool(function, name)
    except (TypeError, ValueError, NameError) as error:
        raise PluginError(f"{address!r} is no tool: {error}") from error


def _tool(function: Callable[..., Any], name: str) -> FunctionTool:
    hints = typing.get_type_hints(function, include_extras=True)
    description, documented = read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise TypeError("it has no docstring, and the model reads it to know what the function does")
    fields = list[Any]()
    words = dict[str, str]()
    episode = ""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"its parameter {parameter.name!r} cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"its parameter {parameter.name!r} has no type")
        kind = hints[parameter.name]
        if kind is Episode:
            episode = parameter.name
            continue
        words[parameter.name] = _annotated(kind) or documented.get(parameter.name, "")
        has_default = parameter.default is not parameter.empty
        fields.append((parameter.name, kind, _default(parameter.default)) if has_default else (parameter.name, kind))
    arguments = msgspec.defstruct("arguments", fields, forbid_unknown_fields=True, kw_only=True)
    return FunctionTool(
        getattr(function, "__name__", name),
        description,
        _schema(arguments, words),
        function,
        inspect.iscoroutinefunction(function),
        episode,
        arguments,
    )


def _default(value: Any) -> Any:
    """Return a default in a form that a struct accepts: for a list, dict or set, a factory that returns it."""
    return msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value


def _annotated(kind: Any) -> str:
    """Return the words of `Annotated[type, "words"]`."""
    found = (extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, str))
    return next(found, "")


def _schema(arguments: type[msgspec.Struct], words: dict[str, str]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = dict(components.pop(arguments.__name__))
    own.pop("title", None)
    for name, described in words.items():
        if described:
            own["properties"][name] = {**own["properties"][name], "description": described}
    if components:
        own["$defs"] = components
    return json.loads(msgspec.json.encode(own))  # type: ignore[no-any-return]


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring, and that of each argument: Google's `Args:` or Sphinx's `:param x:`."""
    description, found = list[str](), dict[str, str]()
    section, last, indent = "", "", 0
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, last = heading[1], ""
        elif parameter := _FIELD.match(line):
            section, last = "fields", parameter[1]
            found[last] = parameter[2].strip()
        elif line.lstrip().startswith((":return", ":raise", ":rtype")):
            section, last = "fields", ""
        elif not section:
            description.append(line)
        elif (
            section in ("Args", "Arguments", "Parameters")
            and (argument := _ARGUMENT.match(line))
            and (not last or len(argument[1]) <= indent)
        ):
            last, indent = argument[2], len(argument[1])
            found[last] = argument[3].strip()
        elif last and line.strip():
            found[last] = f"{found[last]} {line.strip()}".strip()
    return "\n".join(description).strip(), found


def as_text(value: Any) -> str:
    """Return what a function returned as text: text as it is, nothing as nothing, anything else as JSON. JSON has no
    numbers that are not finite, so these are `nan` and `inf`.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        return str(value)
