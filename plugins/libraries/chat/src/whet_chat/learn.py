"""Learns how a template writes tool calls: it renders probes, and takes the first reader that reads them back."""

import json
import re
from collections.abc import Callable, Iterator

from attrs import frozen

from whet.data.messages import Call, Conversation, Message, Tools
from whet.errors import DataError
from whet_chat.calls import BracesCalls, ElementCalls, Frame, JsonCalls, PythonCalls, Reader, TaggedCalls
from whet_chat.values import read_json, read_value

NAME, TEXT, NUMBER, OBJECT = "whet_probe", "blade", "count", "how"
"""The names of the tool of probes, and of its arguments."""
FIRST, SECOND = ({TEXT: f"wx{i} yz", NUMBER: 7130 + i, OBJECT: {"aa": [1, "bb"]}} for i in (1, 2))
_TYPES = {TEXT: "string", NUMBER: "integer", OBJECT: "object"}
_ONE = {"description": "Something.", "additionalProperties": {"type": "string"}}  # some templates read it in objects
_PROPERTIES = {name: {"type": kind, **_ONE} for name, kind in _TYPES.items()}
_FUNCTION = {
    "name": NAME, "description": "Sharpen.",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": [TEXT], "additionalProperties": False},
}  # fmt: skip
TOOL = json.dumps({"type": "function", "function": _FUNCTION})
CALLS = tuple(Call(f"12345678{i}", NAME, json.dumps(one)) for i, one in enumerate((FIRST, SECOND)))
USER = Message("user", "steel?")
_WORD, _MARK = re.compile(r"[\w\s]"), re.compile(r"<[^<]*|\[\[[^\[]*|\[[^\[]*")
_PIECES = re.compile(r"<[^<\s]*|[^<\s]+")

Render = Callable[[Conversation, Tools, bool], str]
"""(conversation, tools, whether the header of a next turn is added) -> the rendered text."""


@frozen
class Turn:
    """A turn with calls, as a template writes it."""

    text: str
    """The rendered text, from the first letter that differs from the prompt."""
    count: int
    """The number of its calls: 1 or 2."""

    def between(self, end: int) -> str:
        """Return the text from a position to the name in the second call. Empty: there is only one call."""
        argument = self.text.find(TEXT, end)
        at = self.text.rfind(NAME, end, argument)
        return self.text[end:at] if self.count > 1 and at >= 0 else ""


def learn_calls(render: Render) -> tuple[Reader | None, str, bool]:
    """Return the reader of a template's calls, why the template cannot be used with tools (empty: it can be used), and
    whether it renders the calls of a message.
    """
    try:
        asked = render((USER,), (TOOL,), True)
    except DataError as error:
        return None, str(error), False
    why = "" if NAME in asked else "it leaves them out"
    for count in (2, 1):
        turn = _turn(render, asked, count)
        found = next((one for one in _candidates(turn) if _reads_back(one, turn)), None) if turn else None
        if found is not None:
            return found, why, True
    hinted = next((one for hint, one in _HINTS if hint in asked), None)
    return hinted, why or ("" if hinted else "it does not show how calls are written"), False


def _turn(render: Render, asked: str, count: int) -> Turn | None:
    """Return a turn with one or two calls. None: the template writes fewer, or refuses it."""
    try:
        whole = render((USER, Message("assistant", "", CALLS[:count])), (TOOL,), False)
    except DataError:
        return None
    start = common(asked, whole)
    text = whole[whole.rfind("<", 0, start) if _in_tag(whole, start) else start :]
    return Turn(text, count) if text.count(NAME) >= count else None


def _in_tag(text: str, at: int) -> bool:
    """Return whether a position is within a tag."""
    return text.rfind("<", 0, at) > text.rfind(">", 0, at)


def _reads_back(reader: Reader, turn: Turn) -> bool:
    """Return whether a reader finds the calls of a turn, with the end of the turn or without it."""
    texts = (turn.text, turn.text[: 1 + max(turn.text.rfind("}"), turn.text.rfind("]"))])
    return any(_reads(reader, text, turn.count) for text in texts)


def _reads(reader: Reader, text: str, count: int) -> bool:
    try:
        _, found = reader.calls(text, (TOOL,))
    except ValueError:
        return False
    return [(one.name, json.loads(one.arguments)) for one in found] == [(NAME, FIRST), (NAME, SECOND)][:count]


def _candidates(turn: Turn) -> Iterator[Reader]:
    """Yield readers that may fit a turn."""
    for kind in (_json, _tagged, _python, _braces, _elements):
        try:
            yield from kind(turn)
        except (ValueError, IndexError):
            continue


def _json(turn: Turn) -> Iterator[Reader]:
    for at in (i for i, letter in enumerate(turn.text) if letter == "{"):
        try:
            value, end = read_json(turn.text, at)
        except ValueError:
            continue
        named = turn.text.rfind(NAME, 0, at)
        if value == FIRST and named >= 0:
            tag = _last_mark(turn.text[named + len(NAME) : at])
            before = turn.text[:named]
            if not before.strip():
                yield JsonCalls(Frame(_last_mark(turn.between(end)) or turn.between(end).strip(), leading=True), None)
                return
            for marker in (_shared(before, turn.between(end)), _last_mark(before)):
                prefix = before.rpartition(_last_mark(before))[2] if marker == _last_mark(before) else ""
                yield JsonCalls(_frame(before, marker.removesuffix(prefix).rstrip()), None, "", prefix.strip(), tag)
            return
        arguments = [key for key, held in value.items() if held in (FIRST, CALLS[0].arguments)]
        names = [key for key, held in value.items() if held == NAME]
        if arguments and (names or arguments == [NAME]):
            name, key = (names[0], arguments[0]) if names else ("", "")
            before = turn.text[:at].rstrip()
            before = before.removesuffix("[").rstrip() if not before.endswith("]") else before
            marker = _shared(before, turn.text[end : turn.text.find("{", end)] if turn.count > 1 else "")
            yield JsonCalls(_frame(before, marker), name, key)
            yield JsonCalls(_frame(before, _last_mark(before)), name, key)
            yield JsonCalls(Frame(""), name, key)
            return


def _tagged(turn: Turn) -> Iterator[Reader]:
    text, key1 = turn.text, turn.text.index(TEXT)
    name = text.rindex(NAME, 0, key1)
    before = text[:name]
    value1 = text.index(str(FIRST[TEXT]), key1)
    end1 = value1 + len(str(FIRST[TEXT]))
    key2 = text.index(NUMBER, end1)
    value2 = text.index(str(FIRST[NUMBER]), key2)
    key3 = text.index(OBJECT, value2)
    value3, end3 = read_value(text, text.index("{", key3))
    if value3 != FIRST[OBJECT]:
        return
    named, gap, after = text[name + len(NAME) : key1], text[end1:key2], text[end3:]
    opening = _last_mark(named[len(named) - _common_end(named, gap) :])
    close = gap.removesuffix(opening).strip()
    middles = [text[key1 + len(TEXT) : value1], text[key2 + len(NUMBER) : value2]]
    middles.append(text[key3 + len(OBJECT) : text.index("{", key3)])
    first = middles[0][: min(common(middles[0], other) for other in middles[1:])]
    last = middles[0][len(middles[0]) - min(_common_end(middles[0], other) for other in middles[1:]) :]
    alike = middles[0] == middles[1]
    lines = middles[0].endswith("\n") and gap.startswith("\n")
    middle = ("".join(middles[0].rstrip("\n") if lines else middles[0]), "") if alike else (first, last)
    end = first_mark(after.strip().removeprefix(close).strip())
    rest = named.removesuffix(opening).strip()
    name_end = rest[: next((i for i, letter in enumerate(rest) if _WORD.match(letter)), len(rest))]
    if not (opening and close and middle[0] and end):
        return
    frame = _frame(before, _last_mark(before))
    yield TaggedCalls(frame, name_end, opening, middle, "" if alike else middles[0], close, end, lines)


def _python(turn: Turn) -> Iterator[Reader]:
    if f"{NAME}(" in turn.text:
        before = turn.text[: turn.text.index(NAME)].rstrip().removesuffix("[")
        yield PythonCalls(_frame(before, _last_mark(before)))


def _braces(turn: Turn) -> Iterator[Reader]:
    name = turn.text.index(NAME)
    begin = turn.text.index(f"{TEXT}:", name) + len(TEXT) + 1
    quote = turn.text[begin : turn.text.index(str(FIRST[TEXT]), begin)]
    yield BracesCalls(_frame(turn.text[:name], _last_mark(turn.text[:name])), quote)


def _elements(turn: Turn) -> Iterator[Reader]:
    text, name = turn.text, turn.text.index(NAME)
    first = text.index(f"<{TEXT}>", name)
    tail = text.index(f"</{OBJECT}>", first)
    value_end = text.index(str(FIRST[TEXT]), first) + len(str(FIRST[TEXT]))
    mark = text[value_end : text.index(f"</{TEXT}>", value_end)]
    name_end = text[name + len(NAME) : first].removesuffix(mark).strip()
    after = text[tail + len(OBJECT) + 3 :].lstrip()
    end = after[: after.index(">") + 1]
    yield ElementCalls(_frame(text[:name], _last_mark(text[:name])), name_end, mark, end)


def _frame(before: str, marker: str) -> Frame:
    marker = marker.strip()
    return Frame(marker, marks(before.rstrip().removesuffix(marker)))


def _shared(before: str, between: str) -> str:
    """Return the text before each call: it ends both the text before the first call and the text between two calls."""
    if not between.strip():
        return _first_mark_on(before.strip())
    before, between = before.rstrip(), between.rstrip()
    length = _common_end(before, between)
    return _first_mark_on(before[len(before) - length :].strip() if length else before.strip())


def _first_mark_on(text: str) -> str:
    found = _MARK.search(text)
    return text[found.start() :] if found else text


def _last_mark(text: str) -> str:
    """Return the text from its last tag on, without what is before it. Empty: it has no tag."""
    text = text.rstrip()
    at = max(text.rfind("<"), text.rfind("["))
    while at > 0 and text[at - 1] in "<[":
        at -= 1
    return text[at:] if at >= 0 else ""


def first_mark(text: str) -> str:
    """Return the tag at the beginning of a text. Empty: it begins with none."""
    found = _MARK.match(text)
    return found[0].strip() if found else ""


def marks(text: str) -> tuple[str, ...]:
    """Return the tags and words of a text."""
    return tuple(found.strip() for found in _PIECES.findall(text))


def common(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _common_end(one: str, other: str) -> int:
    return common(one[::-1], other[::-1])


_HINTS: tuple[tuple[str, Reader], ...] = (
    (
        "<|im_middle|>",
        JsonCalls(
            Frame("<|tool_call_begin|>", ("<|tool_calls_section_begin|>",)),
            None,
            "",
            "functions.",
            "<|tool_call_argument_begin|>",
        ),
    ),
    ("<|tool_list_start|>", PythonCalls(Frame("<|tool_call_start|>"))),
    ("<|tool_call|>", JsonCalls(Frame("<|tool_call|>"), "name", "arguments")),
    ("<tool_call>", JsonCalls(Frame("<tool_call>"), "name", "arguments")),
    ("List of tools: [", PythonCalls(Frame("<|tool_call_start|>"))),
    ("[func_name1(", PythonCalls(Frame(""))),
)
"""(text in a rendered prompt, reader) for templates that show tools but do not render calls of messages."""
