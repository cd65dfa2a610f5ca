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
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

from attrs import evolve

from whet.config.messages import found_words
from whet.data.messages import Call, Conversation, Message, Tools, conversation
from whet.errors import DataError
from whet.interfaces.chat import Tokenizer

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the reasoning of an assistant message."""
BESIDE = ("system", "images", "image")
"""Columns beside the conversation of a record: the text of its system message, and images, which no model reads yet."""


class TurnsInText(list[Any]):
    """Turns that were read from the text of a table's cell. Without a chat template, the text counts."""

    def __init__(self, turns: Iterable[Any], text: str) -> None:
        super().__init__(turns)
        self.text = text


def conversation_of(value: Any) -> Conversation:
    """Return the conversation in a column: a string (one user message), or a list of messages. Raises `DataError`."""
    value = _items(value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        return conversation(value)
    return tuple(_message(item) if isinstance(item, Mapping) else conversation([item])[0] for item in value)


def refuse_no_turns(record: Mapping[str, Any], names: Mapping[str, str], fields: Iterable[str]) -> None:
    """Raise `DataError` if the column of a field has neither text nor messages, e.g. a number."""
    for name in fields:
        own = names.get(name, name)
        if (value := record.get(own)) is not None and not isinstance(value, Iterable):
            field = "" if own == name else f" ({name})"
            words = f"must be text or a list of messages, found {found_words(value)}; write it as text"
            raise DataError(f"the column {own!r}{field} {words}")


def text_of(value: Any) -> str:
    """Return the text in a column that is trained on without a chat template. Raises `DataError`."""
    value = value.text if isinstance(value, TurnsInText) else value
    if not isinstance(value, str) or not value:
        raise DataError(f"a text must be a string that is not empty, found {value!r:.120}")
    return value


def answered(prompt: Conversation, response: Any) -> tuple[Conversation, int]:
    """Return the conversation of a prompt and a response, and how many of its messages are the prompt.

    See `joined`. Of messages that state their own prompt, it is all before the assistant's messages at the end.
    """
    whole, first = joined(prompt, response)
    return whole, before_response(whole) if first is None else first


def joined(prompt: Conversation, response: Any) -> tuple[Conversation, int | None]:
    """Return the conversation of a prompt and a response, and how many of its messages are the prompt.

    A response is a string, the messages that follow the prompt, or all messages, which may lack the beginning of the
    prompt. None: the response has all messages and begins otherwise than the prompt, so its own messages state it.
    Raises `DataError` if the response would have to go on a message that the prompt ends in.
    """
    messages = (Message("assistant", response),) if isinstance(response, str) else conversation_of(response)
    begins = messages[0].role if messages else ""
    is_whole = begins == "system" or (begins == "user" and (not prompt or prompt[-1].role == "user"))
    for start in range(len(prompt) if is_whole else min(1, len(prompt))):
        if messages[: len(prompt) - start] == prompt[start:]:
            return (*prompt[:start], *messages), len(prompt)
    if not is_whole:
        if begins == "assistant" and prompt and prompt[-1].role == "assistant":
            raise DataError(
                "the prompt ends in a message of the assistant, and the response begins with another one; wanted a "
                "prompt that ends in a question: put what the assistant began into the response"
            )
        return (*prompt, *messages), len(prompt)
    system = prompt[:1] if begins != "system" and prompt and prompt[0].role == "system" else ()
    return (*system, *messages), None


def before_response(whole: Conversation) -> int:
    """Return how many messages come before the assistant's messages at the end."""
    end = len(whole)
    while end and whole[end - 1].role == "assistant":
        end -= 1
    return end


def untrained(value: Any) -> list[int]:
    """Return which messages of the assistant in a column are not to be trained on, counted from the end (-1: the last).

    They have `weight: 0`, as in OpenAI's format, or `train: false`, as in axolotl's. Raises `DataError` for others.
    """
    found, value = [], _items(value)
    for place, item in enumerate(value, -len(value)) if isinstance(value, list | tuple) else ():
        if isinstance(item, Mapping) and item.get("role") == "assistant":
            weight, train = item.get("weight"), item.get("train")
            if weight not in (None, 0, 1):
                raise DataError(f"the `weight` of a message is {weight!r:.40}, wanted 0 or 1")
            if train not in (None, False, True):
                raise DataError(f"the key `train` of a message is {train!r:.40}, wanted true or false")
            if 0 in (weight, train):
                found.append(place)
    return found


def refuse_untrained(whole: Conversation, first: int, response: Any) -> None:
    """Raise `DataError` if a message of a response is not to be trained on. The messages before `first` are its prompt.

    A response is learned as a whole.
    """
    if any(len(whole) + place >= first for place in untrained(response)):
        raise DataError(
            "a message of the response has `weight: 0` or `train: false`, and a response is learned as a whole; leave "
            "out the record or the key"
        )


def with_system(
    record: Mapping[str, Any], names: Mapping[str, str], whole: Conversation, first: int = 0
) -> tuple[Conversation, int]:
    """Return a conversation with the text in the record's column `system` in front, unless it has a system message, and
    how many of its messages are the prompt.

    A column that `names` gives another meaning is left alone. Raises `DataError` if the column is no text, or the
    record has images.
    """
    given = {name: record[name] for name in BESIDE if record.get(name) and name not in names.values()}
    text = given.pop("system", "")
    if given:
        raise DataError(f"the column `{next(iter(given))}` has images, and no model reads images yet; leave them out")
    if not isinstance(text, str):
        raise DataError(f"the column `system` is {text!r:.60}, wanted text")
    if not text.strip() or any(message.role == "system" for message in whole):
        return whole, first
    return (Message("system", text), *whole), first + 1


def tools_of(value: Any) -> Tools:
    """Return the tools of a record: a list, or its JSON text. A tool may lack the `function` around it. Raises
    `DataError`.
    """
    found = parsed(_stated(listed(value)), "tools")
    if not isinstance(found, list):
        raise DataError(f"the tools are {value!r:.80}, wanted a list")
    return tuple(_json(_tool(parsed(one, "tools")), "a tool is") for one in found)


TOOLS = "tools"
"""The column with the tools of a record, beside those of its conversations."""


def with_tools_named(record: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the record with its tools in the column `tools`, where `names` has another column for them."""
    return {**record, TOOLS: record.get(names[TOOLS])} if TOOLS in names else record


def with_fields(record: Mapping[str, Any], chat: Tokenizer, *conversations: Conversation) -> Tokenizer:
    """Return the tokenizer with the tools of a record, in its column `tools`.

    Raises `DataError` if the template leaves out what the conversations have in fields, or their messages of a role: a
    model that is trained on such a text learns to leave it out. Of reasoning, that of the last message counts.
    """
    for role, kind in (("system", "system message"), ("tool", "result of a tool")):
        found = next((message for one in conversations for message in one if message.role == role), None)
        if found and _leaves_out(cast(Hashable, chat), role):
            raise _left_out(kind, found.text)
    tools = tools_of(record["tools"]) if record.get("tools") else ()
    names = [json.loads(tool)["function"]["name"] for tool in tools]
    chat, shown = chat.with_tools(tools) if tools else chat, set[str]()
    unlisted = _unlisted(chat, conversations[0], tools) if tools and conversations else set[str]()
    for one in conversations:
        named = {"tool": names, "tool call": [call.name for message in one for call in message.calls]}
        thoughts = one[-1].reasoning.strip() if one else ""
        text = chat.render(one) if thoughts or any(named.values()) else ""
        unshown = {name for name in named["tool call"] if name not in shown and not _shows(chat, one, name, text)}
        shown.update(named["tool call"])
        left_out = {"tool": unlisted, "tool call": unshown}
        for kind, words in named.items():
            if missing := next((word for word in words if word not in text or word in left_out.get(kind, ())), ""):
                raise _left_out(kind, missing)
        if thoughts and not _shows_reasoning(chat, one, text):
            raise _left_out("reasoning", thoughts)
    return chat


def _left_out(kind: str, words: str) -> DataError:
    return DataError(
        f"the chat template leaves out the {kind} {words!r:.60}; use a model that was tuned for it, or a template with "
        "model.chat_template, or write it into the content of the messages"
    )


@lru_cache(maxsize=4)
def _leaves_out(chat: Tokenizer, role: str) -> bool:
    """Return whether the chat template writes the same text whatever a message of a role holds."""
    call = Call("whetstone", "grind", "{}")  # some templates want an id of nine letters
    tool = {"type": "function", "function": {"name": "grind", "description": "", "parameters": {"type": "object"}}}
    before = (Message("user", "dull?"), Message("assistant", "", (call,)))
    after = (Message("assistant", "yes"),)
    probes = [
        (*before, Message("tool", text, answers="whetstone"), *after) if role == "tool"
        else (Message("system", text), Message("user", "dull?"), *after)
        for text in ("steel", "iron")
    ]  # fmt: skip
    try:
        one, other = map((chat.with_tools((json.dumps(tool),)) if role == "tool" else chat).render, probes)
    except DataError:  # the template refuses the role itself
        return False
    return one == other


def _shows(chat: Tokenizer, one: Conversation, name: str, text: str) -> bool:
    """Return whether the text of a conversation has the calls of a tool: the list of tools has its name, too."""
    calls = [[evolve(call, name=f"{name}_") if call.name == name else call for call in m.calls] for m in one]
    try:
        return chat.render(tuple(evolve(m, calls=tuple(own)) for m, own in zip(one, calls, strict=True))) != text
    except DataError:  # the template knows which tools there are
        return True


def _shows_reasoning(chat: Tokenizer, one: Conversation, text: str) -> bool:
    """Return whether the text of a conversation has the reasoning of its last message, from beginning to end.

    Other messages may have the same words, so a word is put before the reasoning and after it, and looked for.
    """
    word = "whetstone"
    longer = evolve(one[-1], reasoning=f"{word} {one[-1].reasoning.strip()} {word}")
    return chat.render((*one[:-1], longer)).count(word) >= text.count(word) + 2


def _unlisted(chat: Tokenizer, one: Conversation, tools: Tools) -> set[str]:
    """Return the names of the tools that the template does not list: calls and other text may have a name, too."""
    known = [json.loads(tool) for tool in tools]
    probes = {f"whetstone_{i}_": tool["function"]["name"] for i, tool in enumerate(known)}
    renamed = [
        json.dumps({**tool, "function": {**tool["function"], "name": probe}}, ensure_ascii=False)
        for probe, tool in zip(probes, known, strict=True)
    ]
    try:
        text = chat.with_tools(tuple(renamed)).render(one)
    except DataError:  # the template knows which tools there are
        return set()
    return {name for probe, name in probes.items() if probe not in text}


def _message(item: Mapping[str, Any]) -> Message:
    """Return a message with its fields. Empty fields count as absent, as tables have them in every row."""
    if item.get("function_call"):
        raise DataError("a message has a `function_call`, OpenAI's former form; wanted `tool_calls`, a list of calls")
    given = parsed(_stated(listed(item.get("tool_calls") or [])), "tool_calls")
    calls = tuple(_call(parsed(one, "tool_calls")) for one in given)
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
    arguments = {} if given in (None, "") else parsed(given, f"the arguments of a call of {name!r:.40}")
    if not isinstance(arguments, Mapping):
        raise DataError(f"the arguments of a call of {name!r:.40} are {arguments!r:.80}, wanted an object")
    return Call(str(item.get("id") or ""), name, _json(arguments, f"the arguments of a call of {name!r:.40} are"))


def _tool(item: Any) -> dict[str, Any]:
    tool = item if isinstance(item, Mapping) and "function" in item else {"type": "function", "function": item}
    function = tool["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool is {item!r:.120}, wanted a function with a name")
    return {"type": "function", "function": dict(function)}


def _items(value: Any) -> Any:
    """Return the messages in a column as a list. A string, and what has no messages, is returned as it is."""
    value = listed(value)
    return [value] if isinstance(value, Mapping) else value


def listed(value: Any) -> Any:
    """Return a list of objects if the value is an object of lists, as `Sequence` of the library `datasets` stores them.
    Any other value is returned as it is.
    """
    columns = {name: held for name, held in value.items() if held is not None} if isinstance(value, Mapping) else {}
    if not columns or not all(isinstance(held, list) for held in columns.values()):
        return value
    if len({len(held) for held in columns.values()}) > 1:
        return value
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _json(value: Any, what: str) -> str:
    """Return the JSON text of a value. Raises `DataError` if a part of it has no JSON, such as a date in a table."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{what} {value!r:.80}, which JSON cannot hold: {error}; wanted text, finite numbers, true, false, null, "
            "and lists and objects of these: write dates, decimals and bytes as text"
        ) from error


def _stated(value: Any) -> Any:
    """Return a value without the null fields of objects in it."""
    if isinstance(value, Mapping):
        return {key: _stated(held) for key, held in value.items() if held is not None}
    return [_stated(one) for one in value] if isinstance(value, list) else value


def parsed(value: Any, what: str) -> Any:
    """Return a value, or what it is the JSON text of. Raises `DataError`."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: {value!r:.80} is no JSON: {error}") from error


def from_json(text: str) -> Any:
    """Return the value of JSON text. Raises `ValueError` if it is no JSON, or has half of a character."""
    value = json.loads(text)
    try:
        if "\\u" in text:  # no tokenizer takes a surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a character (a surrogate such as \\ud800), wanted whole ones") from error
    return value
