"""Calls that a request forces: the text is held to a JSON schema of calls, whatever the chat template's own format is.

    tool_choice required           [{"name": "add", "arguments": {"a": 3}}, ...]   of any tools, at least one
    tool_choice of one function    the same, of this one alone
    parallel_tool_calls false      exactly one

It is what vLLM does for `tool_choice: required`. It is for requests outside of episodes: training needs samples of the
model itself.
"""

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from whet.data.messages import Call, Tools
from whet_endpoint.errors import ApiError, unwanted


@frozen
class Tooling:
    """The tools of a request, and what becomes of calls."""

    tools: Tools
    """Tools that the prompt describes."""
    reads_calls: bool
    """Whether calls in the response are parsed."""
    schema: str = ""
    """The JSON schema that forces calls. Empty: none are forced."""


def forces(choice: Any) -> bool:
    """Return whether a `tool_choice` wants a call."""
    return choice not in ("auto", "none")


def calls_schema(tools: Tools, choice: Any, parallel: bool) -> str:
    """Return the JSON schema of the calls that a `tool_choice` wants, as text. Raises `ApiError`.

    `choice` has the form of Chat or of Responses.
    """
    functions = {tool["name"]: tool for tool in (json.loads(text)["function"] for text in tools)}
    names = list(functions) if choice == "required" else [_named(choice)]
    if not functions or not set(names) <= functions.keys():
        raise ApiError(400, f"tool_choice is {choice!r:.80}, and the tools are {list(functions)!r:.200}", "tool_choice")
    shared: dict[str, Any] = {}
    calls = [_call(functions[name], shared) for name in names]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **({} if parallel else {"maxItems": 1})}
    return json.dumps({**schema, **({"$defs": shared} if shared else {})})


def read_calls(text: str, tools: Tools) -> tuple[Call, ...]:
    """Return the calls in a text that was held to `calls_schema`. Empty: it was cut before its end."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    names = {json.loads(tool)["function"]["name"] for tool in tools}
    if not isinstance(found, list) or not all(_is_call(one, names) for one in found):
        return ()
    return tuple(Call("", one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in found)


def _is_call(value: Any, names: set[str]) -> bool:
    return isinstance(value, dict) and value.get("name") in names and isinstance(value.get("arguments"), dict)


def _named(choice: Any) -> str:
    held = choice if isinstance(choice, Mapping) and choice.get("type") == "function" else {}
    named = held.get("function", held)
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise unwanted("tool_choice", choice, "auto, none, required, or a function by its name")
    return name


def _call(function: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, and move the definitions of its parameters to those that all calls share."""
    parameters = {"type": "object", **(function.get("parameters") or {})}
    definitions = parameters.pop("$defs", {})
    if not isinstance(definitions, dict):
        raise unwanted("tools", definitions, "an object as $defs of the parameters")
    for key, definition in definitions.items():
        if shared.setdefault(key, definition) != definition:
            raise ApiError(400, f"two tools define {key!r:.80} differently; a forced call needs one", "tools")
    properties = {"name": {"const": function["name"]}, "arguments": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": list[str](properties),
        "additionalProperties": False,
    }
