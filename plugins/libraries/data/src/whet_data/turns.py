"""Conversations of records: messages with tool calls and reasoning in fields, and the tools that a record states.

    {"role": "assistant", "reasoning_content": "...", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]}
    {"role": "tool", "tool_call_id": "c1", "content": "7"}

The chat template writes the fields, in the model's own format. Data sets differ in details: arguments as an object or
as its text, `reasoning` or `thinking` in place of `reasoning_content`, calls without `function` around them.

Tables (Parquet, saved data sets, the hub) have one set of fields for all calls and all tools, with null where a record
has no such field. So null fields of tools and calls count as absent. Those in JSON text stay.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from whet.data.messages import Call, Conversation, Message, Tools, conversation
from whet.errors import DataError
from whet.interfaces.chat import Tokenizer

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the reasoning of an assistant message."""


def conversation_of(value: Any) -> Conversation:
    """Return the conversation in a column: a string (one user message), or a list of messages. Raises `DataError`."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return conversation(value)
    return tuple(_message(item) if isinstance(item, Mapping) else conversation([item])[0] for item in value)


def tools_of(value: Any) -> Tools:
    """Return the tools of a record: a list, or its JSON text. A tool may lack the `function` around it. Raises
    `DataError`.
    """
    found = _parsed(_stated(value), "tools")
    if not isinstance(found, list):
        raise DataError(f"the tools are {value!r:.80}, wanted a list")
    return tuple(json.dumps(_tool(_parsed(one, "tools")), ensure_ascii=False) for one in found)


def with_fields(record: Mapping[str, Any], chat: Tokenizer, *conversations: Conversation) -> Tokenizer:
    """Return the tokenizer with the tools of a record, in its column `tools`.

    Raises `DataError` if the template leaves out what the conversations have in fields: a model that is trained on such
    a text learns to leave it out. Of reasoning, that of the last message counts.
    """
    tools = tools_of(record["tools"]) if record.get("tools") else ()
    chat, shown = chat.with_tools(tools) if tools else chat, set[str]()
    for one in conversations:
        named = {"tool": [json.loads(tool)["function"]["name"] for tool in tools]}
        named["tool call"] = [call.name for message in one for call in message.calls]
        named["reasoning"] = [message.reasoning.strip()[:40] for message in one[-1:] if message.reasoning]
        text = chat.render(one) if any(named.values()) else ""
        unshown = {name for name in named["tool call"] if name not in shown and not _shows(chat, one, name, text)}
        shown.update(named["tool call"])
        for kind, words in named.items():
            left_out = unshown if kind == "tool call" else ()
            if missing := next((word for word in words if word not in text or word in left_out), ""):
                raise DataError(
                    f"the chat template leaves out the {kind} {missing!r:.60}; use a model that was tuned for it, or a "
                    "template with model.chat_template, or write it into the content of the messages"
                )
    return chat


def _shows(chat: Tokenizer, one: Conversation, name: str, text: str) -> bool:
    """Return whether the text of a conversation has the calls of a tool: the list of tools has its name, too."""
    calls = [[evolve(call, name=f"{name}_") if call.name == name else call for call in m.calls] for m in one]
    try:
        return chat.render(tuple(evolve(m, calls=tuple(own)) for m, own in zip(one, calls, strict=True))) != text
    except DataError:  # the template knows which tools there are
        return True


def _message(item: Mapping[str, Any]) -> Message:
    """Return a message with its fields. Empty fields count as absent, as tables have them in every row."""
    given = _parsed(_stated(item.get("tool_calls") or []), "tool_calls")
    calls = tuple(_call(_parsed(one, "tool_calls")) for one in given)
    thoughts = [item[name] for name in REASONING if item.get(name)]
    if not isinstance(reasoning := thoughts[0] if thoughts else "", str):
        raise DataError(f"the reasoning of a message is {reasoning!r:.60}, wanted text")
    if (calls or reasoning) and item.get("role") != "assistant":
        raise DataError(f"a message of {item.get('role')!r:.40} has tool calls or reasoning, wanted the assistant's")
    content = item.get("content")
    (message,) = conversation([{**item, "content": "" if content is None and (calls or reasoning) else content}])
    answers = item.get("tool_call_id") if message.role == "tool" else None
    if not isinstance(answers, str | None):
        raise DataError(f"the `tool_call_id` of a message is {answers!r:.60}, wanted text")
    return evolve(message, calls=calls, reasoning=reasoning, answers=answers or "")


def _call(item: Any) -> Call:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(function, Mapping):
        raise DataError(f"a tool call is {item!r:.120}, wanted {{function: {{name, arguments}}}}")
    given = function.get("arguments")
    arguments = {} if given in (None, "") else _parsed(given, f"the arguments of a call of {name!r:.40}")
    if not isinstance(arguments, Mapping):
        raise DataError(f"the arguments of a call of {name!r:.40} are {arguments!r:.80}, wanted an object")
    return Call(str(item.get("id") or ""), name, json.dumps(arguments, ensure_ascii=False))


def _tool(item: Any) -> dict[str, Any]:
    tool = item if isinstance(item, Mapping) and "function" in item else {"type": "function", "function": item}
    function = tool["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool is {item!r:.120}, wanted a function with a name")
    return {"type": "function", "function": dict(function)}


def _stated(value: Any) -> Any:
    """Return a value without the null fields of objects in it."""
    if isinstance(value, Mapping):
        return {key: _stated(held) for key, held in value.items() if held is not None}
    return [_stated(one) for one in value] if isinstance(value, list) else value


def _parsed(value: Any, what: str) -> Any:
    """Return a value, or what it is the JSON text of. Raises `DataError`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: {value!r:.80} is no JSON: {error}") from error
