"""Messages and tools in the format of OpenAI's API, as core's records."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import evolve

from whet.data.messages import Call, Conversation, Message, Tools, conversation
from whet.errors import DataError
from whet_endpoint.errors import ApiError, unwanted

MOST_TOOLS = 128
"""Most tools in one request."""
MOST_NESTED = 200
"""Most lists and objects within each other in what a prompt or a response repeats; Python's JSON fails near 1000."""
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)


def read_messages(value: Any) -> Conversation:
    """Return the messages of a request. Fields that are null count as absent. Raises `ApiError`."""
    if value == []:
        raise unwanted("messages", value, "a list of messages")
    return checked_messages(value, lambda message: (_message(message),))


def checked_messages(value: Any, read: Callable[[Any], Iterable[Message]]) -> Conversation:
    """Return the messages that `read` returns for each item of a list. Raises `ApiError` if one cannot be used."""
    if not isinstance(value, list):
        raise unwanted("messages", value, "a list of messages")
    try:
        messages = tuple(message for item in value for message in read(item))
    except DataError as error:
        raise ApiError(400, str(error), "messages") from error
    if not all(is_text(message.text + message.reasoning) for message in messages):
        raise ApiError(400, "a message has half a character (a lone surrogate)", "messages")
    refuse_last_assistant(messages, "messages")
    return messages


def refuse_last_assistant(messages: Conversation, param: str) -> None:
    """Raise `ApiError` where a conversation has no message that the model could answer. `param`: the parameter."""
    if not messages:
        raise ApiError(400, f"{param} is empty: there is nothing to answer", param)
    if messages[-1].role == "assistant":
        raise ApiError(400, "the last message is the assistant's own: there is nothing to answer", param)


def _message(value: Any) -> Message:
    """Return a message. The role `developer` is read as `system`, and null beside calls as empty text."""
    if not isinstance(value, dict):
        return conversation([value])[0]
    for name in ("function_call", "audio"):
        if value.get(name):
            raise ApiError(400, f"a message has {name}, and messages here are text, and tool_calls", "messages")
    role = "system" if value.get("role") == "developer" else value.get("role")
    calls = _calls(value.get("tool_calls") or [])
    if calls and role != "assistant":
        raise ApiError(400, f"a message of {role!r:.40} has tool_calls, and only the assistant calls tools", "messages")
    content = "" if calls and value.get("content") is None else value.get("content")
    (message,) = conversation([{**value, "role": role, "content": content}])
    answers = value.get("tool_call_id") if role == "tool" else None
    if answers is not None and not (isinstance(answers, str) and is_text(answers)):
        raise unwanted("messages", answers, "text as tool_call_id")
    reasoning = value.get("reasoning_content") or value.get("reasoning") or "" if role == "assistant" else ""
    if not isinstance(reasoning, str) or not is_text(reasoning):
        raise unwanted("messages", reasoning, "text as reasoning_content")
    return evolve(message, calls=calls, answers=answers or "", reasoning=reasoning)


def _calls(value: Any) -> tuple[Call, ...]:
    if not isinstance(value, list):
        raise unwanted("messages", value, "a list as tool_calls")
    return tuple(_call(call) for call in value)


def _call(value: Any) -> Call:
    function = (
        value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    )
    if not isinstance(function, dict):
        raise unwanted("messages", value, "calls of functions as tool_calls")
    return read_call(value.get("id") or "", function.get("name"), function.get("arguments"), "messages")


def read_call(id_: Any, name: Any, arguments: Any, param: str) -> Call:
    """Return a call that a request repeats. Raises `ApiError` that names the parameter."""
    if not isinstance(name, str) or not isinstance(id_, str) or not is_text(name + id_):
        raise unwanted(param, [id_, name], "a call with text as id and name")
    if not isinstance(arguments, str) or not _is_object(arguments):
        raise unwanted(param, arguments, "the text of a JSON object as arguments of a call")
    return Call(id_, name, arguments)


def _is_object(text: str) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and not nests(found) and is_text(json.dumps(found, ensure_ascii=False))


def nests(value: Any) -> bool:
    """Return whether lists and objects in a value nest too deeply to be written as JSON again."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [inner for one in level for inner in _within(one)]
    return bool(level)


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_tools(value: Any) -> tuple[Tools, str]:
    """Return the tools of a request in the format of Chat, and the place of the first one that is `strict`, or ""."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise unwanted("tools", value, f"a list of at most {MOST_TOOLS} tools")
    tools = tuple(_tool(i, tool) for i, tool in enumerate(value))
    return tools, next((f"tools[{i}]" for i, tool in enumerate(value) if tool["function"].get("strict")), "")


def _tool(i: int, tool: Any) -> str:
    """Return a tool as JSON for chat templates, its fields in the order of the request."""
    where = f"tools[{i}]"
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{where} is {tool!r:.80}, wanted a tool of the type function", "tools")
    if not isinstance(name := function.get("name"), str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{where}.function.name is {name!r:.80}, wanted letters, digits, - and _", "tools")
    for key, kind in (("description", str), ("parameters", dict)):
        if not isinstance(function.get(key), kind | None):
            raise ApiError(400, f"{where}.function.{key} is {function[key]!r:.80}, wanted {kind.__name__}", "tools")
    if nests(function):
        raise ApiError(400, f"{where} nests deeper than {MOST_NESTED} lists and objects", "tools")
    kept = {key: held for key, held in function.items() if key in ("name", "description", "parameters") and held}
    text = json.dumps({"type": "function", "function": kept}, ensure_ascii=False)
    if not is_text(text):
        raise ApiError(400, f"{where} has half a character (a lone surrogate)", "tools")
    return text


def is_text(value: str) -> bool:
    """Return whether text has no lone surrogates, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
