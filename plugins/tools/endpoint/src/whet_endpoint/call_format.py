"""How a model writes tool calls. The format is found by rendering the model's chat template, and used to parse
responses.

    Qwen, Hermes     <tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>
    Llama 3          {"name": "f", "parameters": {"x": 1}}
    Mistral          [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "123456789"}]
    DeepSeek         <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>

No template is known by name. A format is described by the text before a call, and by whether the tool's name stands
inside the JSON or before it. A response is hostile text: it is parsed as JSON or kept as text, and nothing else.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from attrs import evolve, frozen

from whet.data.messages import Call, Conversation, Message, Tools
from whet.errors import DataError
from whet.interfaces.chat import Chat

NAME, KEY, VALUE, ANSWER = "whet_probe", "whetstone", "w1", "whet-answer"
TOOL = json.dumps(
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Sharpen.",
            "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]},
        },
    }
)
PROBE = Call("123456789", NAME, json.dumps({KEY: VALUE}))
_SPACE, _SEPARATORS, _MARKER = re.compile(r"\s*"), re.compile(r"[;,\s]*"), re.compile(r"[<\[].*", re.DOTALL)
Render = Callable[[Conversation, Tools], str]
"""(conversation, tools) -> the rendered text, without the header of a next turn."""


@frozen
class CallFormat:
    """How the tool calls in a response are written."""

    opening: str
    """Text that comes once, before all calls of a turn."""
    marker: str
    """Text that comes before each call. Empty: a turn with calls has nothing else in it."""
    middle: str | None
    """Text between the tool's name and the JSON of its arguments. None: one JSON object holds both."""
    name: str = ""
    """The key of the tool's name in that object."""
    arguments: str = ""
    """The key of the arguments in that object."""
    special: bool = False
    """Whether the marker consists of special tokens, so that text decoded without special tokens lacks it."""

    def read(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """Return the text of a response before its tool calls, and the calls, without ids. Damaged calls stay text."""
        try:
            calls = tuple(self._calls(text))
        except (ValueError, RecursionError):
            return text, ()
        if not calls:
            return text, ()
        return text[: text.find(self.marker)].rstrip().removesuffix(self.opening).rstrip(), calls

    def _calls(self, text: str) -> Iterator[Call]:
        if not self.marker:
            yield from self._bare(text.strip())
            return
        at = text.find(self.marker)
        while at >= 0:
            found, at = self._one(text, at + len(self.marker))
            yield from found
            at = text.find(self.marker, at)

    def _one(self, text: str, at: int) -> tuple[list[Call], int]:
        """Parse what follows a marker: one call, or a list of calls. Return the calls and where they end."""
        if self.middle is None:
            value, end = _json(text, at)
            return [self._call(one) for one in (value if isinstance(value, list) else [value])], end
        begin = text.find(self.middle or "{", at)
        name = text[at:begin].strip() if begin >= 0 else ""
        value, end = _json(text, begin + len(self.middle)) if name else (None, at)
        return [_made(name, value)], end

    def _bare(self, text: str) -> Iterator[Call]:
        """Yield the calls of a response that has nothing but calls."""
        at = 0
        while at < len(text):
            value, at = _json(text, at)
            yield from (self._call(one) for one in (value if isinstance(value, list) else [value]))
            at = _after(_SEPARATORS, text, at)

    def _call(self, value: Any) -> Call:
        if not isinstance(value, dict):
            raise ValueError("a call is no object")
        return _made(value.get(self.name), value.get(self.arguments))


_FOUND: WeakKeyDictionary[Chat, CallFormat] = WeakKeyDictionary()


def call_format_of(chat: Chat) -> CallFormat:
    """Return how the model of a chat tokenizer writes tool calls. Raises `DataError` as `call_format` does."""
    if chat not in _FOUND:
        found = call_format(lambda talk, tools: chat.with_tools(tools).render(talk))
        _FOUND[chat] = evolve(found, special=found.marker not in chat.decode(chat.encode(found.marker)))
    return _FOUND[chat]


def call_format(render: Render) -> CallFormat:
    """Return how a template writes tool calls. Raises `DataError` if the template shows no tools or writes no JSON."""
    try:
        asked = render(_talk(), (TOOL,))
        one, two, plain = (_turn(render, asked, *said) for said in ((PROBE,), (PROBE, PROBE), ()))
    except DataError as error:
        raise _unknown(str(error)) from error
    if NAME not in asked:
        raise _unknown("it leaves them out")
    found = _found(one)
    if found is None:
        raise _unknown("it does not write their calls as JSON, so the model's could not be told from text")
    begin, end, middle, keys = found
    opening = _without_lead(begin, plain[: max(plain.find(ANSWER), 0)])
    if middle is None:
        opening = opening.rstrip().removesuffix("[")
    another = _found(two[end:])
    marker = _marker(opening, another[0] if another else "")
    return CallFormat(opening.strip().removesuffix(marker).strip(), marker, middle, *keys)


def _without_lead(begin: str, lead: str) -> str:
    """Return `begin` without the text that every response begins with, such as a header and an empty reasoning
    block.
    """
    if begin.startswith(lead):
        return begin[len(lead) :]
    common = _common(begin, lead)
    return begin[common.rfind("\n") + 1 :]


def _marker(opening: str, between: str) -> str:
    """Return the text before each call: it ends both the text before the first call and the text between two calls."""
    common = _common(opening.rstrip()[::-1], between.rstrip()[::-1])[::-1]
    found = _MARKER.search(common)
    return found[0] if found else opening.strip()


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    length = min(len(one), len(other))
    return one[: next((i for i in range(length) if one[i] != other[i]), length)]


def _talk(*said: Message) -> Conversation:
    return (Message("user", "steel"), *said)


def _turn(render: Render, asked: str, *calls: Call) -> str:
    """Return the rendered turn with these calls, or with a plain response if there are none.

    Empty if the template does not allow several calls in a turn.
    """
    said = Message("assistant", "", calls) if calls else Message("assistant", ANSWER)
    try:
        whole = render(_talk(said), (TOOL,))
    except DataError:
        if len(calls) > 1:
            return ""
        raise
    return whole[len(_common(asked, whole)) :]


def _found(turn: str) -> tuple[str, int, str | None, tuple[str, str]] | None:
    """Find the first call in a turn. Return the text before it, where its JSON ends, and how it is written."""
    for at in (i for i, letter in enumerate(turn) if letter == "{"):
        try:
            value, end = _json(turn, at)
        except ValueError:
            continue
        if value == {KEY: VALUE}:
            name = turn.rfind(NAME, 0, at)
            return (turn[:name], end, turn[name + len(NAME) : at].strip(), ("", "")) if name >= 0 else None
        names = [key for key, held in value.items() if held == NAME]
        arguments = [key for key, held in value.items() if held in ({KEY: VALUE}, PROBE.arguments)]
        if names and arguments:
            return turn[:at], end, None, (names[0], arguments[0])
    return None


def _json(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value at a position, after white space. Return it and its end. Raises `ValueError`."""
    return json.JSONDecoder().raw_decode(text, _after(_SPACE, text, at))


def _after(skipped: re.Pattern[str], text: str, at: int) -> int:
    found = skipped.match(text, at)
    return at if found is None else found.end()


def _made(name: Any, arguments: Any) -> Call:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or arguments that are no object")
    return Call("", name, json.dumps(arguments, ensure_ascii=False))


def _unknown(why: str) -> DataError:
    return DataError(
        f"the model's chat template knows no tools: {why}; use a model that was tuned for them or give a template with "
        "model.chat_template, or describe them in a message"
    )
