"""Tool calls as text, for models whose chat template knows no tools: described in the system message, read as JSON.

    <tool_call>
    {"name": "search", "arguments": {"query": "whetstone"}}
    </tool_call>

The model's text is hostile. It is searched in time linear in its length, and read as JSON and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
LONGEST: Final = 1 << 18
"""Most characters of a response that are searched; a longer one calls nothing."""


@frozen
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why it is no call. Empty: it is one."""
    id: str = ""
    """Its id, where the chat template has one."""


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return tools as the model reads them: one JSON object in each line."""
    functions = ({"type": "function", "function": tool} for tool in tools)
    return "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)


def read_calls(text: str) -> list[ToolCall]:
    """Return the calls in a response, damaged ones included. A last call that is not closed counts if it is whole."""
    found = list[ToolCall]()
    if len(text) > LONGEST:
        return found
    at = text.find(_BEGIN)
    while at >= 0:
        begin = at + len(_BEGIN)
        end = text.find(_END, begin)
        found.append(_read(text[begin : end if end >= 0 else len(text)]))
        at = text.find(_BEGIN, end) if end >= 0 else -1
    return found


def shown_results(results: Sequence[str]) -> str:
    """Return the results of a response's calls, in their order, as one message."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def _read(text: str) -> ToolCall:
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"it is no JSON: {error!s:.200}")
    name = held.get("name") if isinstance(held, dict) else None
    arguments = held.get("arguments", {}) if isinstance(held, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'it is no object with "name", text, and "arguments", an object')
    return ToolCall(name, arguments)
