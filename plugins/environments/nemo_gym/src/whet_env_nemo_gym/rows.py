"""Records of NeMo Gym, and the items of the Responses API in them, as this project's messages and back.

{"responses_create_params": {"input": [{"role": "user", "content": "..."}], "tools": [...]}, ...}
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whet.data.messages import Call, Conversation, Message, Tools
from whet.errors import DataError

KEY = "whet_key"
"""The entry of the metadata that tells the model's endpoint which episode an agent's request belongs to."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def parameters(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of the model's request in a record. Raises `DataError`."""
    found = record.get("responses_create_params")
    if not isinstance(found, Mapping) or "input" not in found:
        raise DataError(
            f"the field 'responses_create_params' has no `input`; the record has {list(record)!r:.120}; wanted a "
            "record of NeMo Gym"
        )
    if not isinstance(found["input"], str | list):
        raise DataError(f"the `input` is {found['input']!r:.120}, wanted text or a list of messages")
    return found


def agent_of(record: Mapping[str, Any]) -> str:
    """Return the name of the agent that a record asks for. Empty: none."""
    found = record.get("agent_ref")
    name = found.get("name") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else ""


def for_agent(record: Mapping[str, Any], system: str, key: str) -> dict[str, Any]:
    """Return a record for an agent. The agent passes its parameters on to the model, with the episode's key."""
    params = dict(parameters(record))
    metadata = params.get("metadata")
    params["metadata"] = {**(metadata if isinstance(metadata, Mapping) else {}), KEY: key}
    if system:
        params["input"] = [{"role": "system", "content": system}, *_items(params["input"])]
    return {**record, "responses_create_params": params}


def opening(system: str, items: Any) -> Conversation:
    """Return the conversation that a record begins with. Raises `DataError`."""
    found = [Message("system", system)] if system else []
    for item in _items(items):
        found.append(_message(item))
    if not found or found[-1].role not in ("user", "tool"):
        raise DataError("the input does not end with a message of the user")
    return tuple(found)


def tools_of(given: Any) -> Tools:
    """Return the tools of a record as chat templates take them. Raises `DataError`."""
    if not isinstance(given, list | None):
        raise DataError(f"`tools` is {given!r:.120}, wanted a list of functions")
    return tuple(
        json.dumps({"type": "function", "function": _function(one)}, ensure_ascii=False) for one in given or ()
    )


def names_of(tools: Tools) -> frozenset[str]:
    """Return the names of tools."""
    return frozenset(json.loads(tool)["function"]["name"] for tool in tools)


def response(params: Mapping[str, Any], items: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return a response of the Responses API, with all fields that a resources server requires."""
    return {
        "id": f"resp_{name}", "object": "response", "created_at": 0, "model": "policy", "output": list(items),
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice", "auto"), "tools": list(params.get("tools") or ()),
    }  # fmt: skip


def written(name: str, text: str, calls: Iterable[Call], reasoning_end: str) -> list[dict[str, Any]]:
    """Return the output items of one response of the model: reasoning, then its calls, or a message if it has none."""
    items: list[dict[str, Any]] = []
    reasoning, found, rest = text.rpartition(reasoning_end) if reasoning_end else ("", "", text)
    if found:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    for number, call in enumerate(calls):
        items.append({
            "type": "function_call", "id": f"fc_{name}_{number}", "call_id": call.id, "name": call.name,
            "arguments": call.arguments, "status": "completed",
        })  # fmt: skip
    if not calls:
        content = [{"type": "output_text", "text": rest.lstrip() if found else rest, "annotations": []}]
        items.append({
            "type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content
        })  # fmt: skip
    return items


def result(call: Call, text: str) -> dict[str, Any]:
    """Return the item with a tool's answer."""
    return {"type": "function_call_output", "call_id": call.id, "output": text}


def _items(given: Any) -> Iterable[Any]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _function(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise DataError(f"a tool is {given!r:.120}, wanted a function with a name; other tools run elsewhere")
    return {key: given[key] for key in ("name", "description", "parameters") if given.get(key) is not None}


def _message(item: Any) -> Message:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message" and (role := _ROLES.get(str(item.get("role")))):
        return Message(role, _text(item.get("content")))
    try:
        if kind == "function_call":
            call = Call(str(item["call_id"]), str(item["name"]), str(item["arguments"]))
            return Message("assistant", "", calls=(call,))
        if kind == "function_call_output":
            return Message("tool", str(item["output"]), answers=str(item["call_id"]))
    except KeyError as error:
        raise DataError(f"the input has {item!r:.120} without {error}") from error
    raise DataError(f"the input has {item!r:.120}, wanted messages, calls and their results")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise DataError(f"a message is {content!r:.120}, wanted text")
    return "".join(part["text"] for part in parts)
