"""Formats of responses: what a template writes is read back, and no text of a model raises or is taken for a call."""

# ruff: noqa: E501 - templates are read best without breaks
import json
import random
from collections.abc import Iterator
from datetime import datetime

import pytest

from whet.data.messages import Call, Conversation, Message, Tools
from whet_chat.response import ResponseFormat, learn
from whet_chat.templates import ChatTemplate

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\n"
)
TAIL = "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n%s{% endif %}"
THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
VALUE = "{{ v if v is string else v | tojson }}"


def template(calls: str, opened: str = "", think: str = THINK) -> str:
    """Return a template that writes calls in this way."""
    return HEAD + think + "{{ m.content or '' }}" + calls + TAIL.replace("%s", opened)


def arguments(before: str, between: str, after: str) -> str:
    """Return the part of a template that writes each argument with text around it."""
    return "{% for k, v in f.arguments.items() %}" + before + "{{ k }}" + between + VALUE + after + "{% endfor %}"


HERMES = template(
    EACH + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
FORMATS = {
    "hermes": HERMES,
    "llama3": template(EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'),
    "qwen3-coder": template(
        EACH + "\n<tool_call>\n<function={{ f.name }}>\n" + arguments("<parameter=", ">\n", "\n</parameter>\n")
        + "</function>\n</tool_call>{% endfor %}",
        opened="<think>\n",
    ),
    "glm": template(
        EACH + "\n<tool_call>{{ f.name }}\n"
        + arguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>{% endfor %}"
    ),
    "minimax": template(
        "{% if m.tool_calls %}\n<minimax:tool_call>\n" + EACH + '<invoke name="{{ f.name }}">\n'
        + arguments('<parameter name="', '">', "</parameter>\n") + "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    ),
    "dsml": template(
        "{% if m.tool_calls %}\n\n<calls>\n" + EACH + '<invoke name="{{ f.name }}">\n'
        "{% for k, v in f.arguments.items() %}<parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        + VALUE + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>{% endif %}"
    ),
    "mistral": template(
        "{% if m.tool_calls %}[TOOL_CALLS][" + EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, '
        '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}'
    ),
    "mistral-3": template(EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "deepseek": template(
        "{% if m.tool_calls %}<|calls|>" + EACH + "<|call|>{{ f.name }}<|sep|>{{ f.arguments | tojson }}<|end_call|>"
        "{% endfor %}<|end_calls|>{% endif %}"
    ),
    "kimi-k2": template(
        "{% if m.tool_calls %}<|section|>" + EACH + "<|call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|argument|>"
        "{{ f.arguments | tojson }}<|call_end|>{% endfor %}<|section_end|>{% endif %}"
    ),
    "python": template(
        "{% if m.tool_calls %}<|python_start|>[" + EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
        "{{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
        "<|python_end|>{% endif %}"
    ),
    "command-r": template(
        "{% if m.tool_calls %}<|START_ACTION|>[" + EACH + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        '"parameters": {{ f.arguments | tojson }}}{% if not loop.last %},\n{% endif %}{% endfor %}]<|END_ACTION|>{% endif %}'
    ),
    "name-is-key": template(
        "{% if m.tool_calls %}<|tools|>[" + EACH + '{"{{ f.name }}": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|end_tools|>{% endif %}"
    ),
    "text-arguments": template(EACH + "<call>{{ f.name }}<sep>{{ f.arguments + '' }}</call>{% endfor %}"),
    "channels": (
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
        "<|end|>{% endif %}{% if m.tool_calls %}" + EACH + "<|start|>assistant to=functions.{{ f.name }}<|channel|>"
        "commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>assistant<|channel|>"
        "final<|message|>{{ m.content }}<|return|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}  # fmt: skip
PARAMETERS = {
    "word": {"type": "string"}, "limit": {"type": "integer"}, "how": {"type": "object"}, "exact": {"type": "boolean"},
}  # fmt: skip
TOOLS: Tools = (
    json.dumps({"type": "function", "function": {"name": "look_up", "parameters": {"properties": PARAMETERS}}}),
    json.dumps({"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}),
)
WORD = 'a "quoted" {word}, [1], = 3; é\nline'
LOOK_UP = Call(
    "123456789", "look_up", json.dumps({"word": WORD, "limit": 3, "how": {"a": [1, "b", None]}, "exact": True})
)
DIGITS = Call("123456789", "look_up", json.dumps({"word": "42", "limit": -1}))
PING = Call("987654321", "ping", "{}")
ONE_CALL = ("llama3",)
"""Formats in which content and several calls cannot be told apart."""


def made(source: str) -> tuple[ChatTemplate, ResponseFormat]:
    found = ChatTemplate(source, {}, datetime(2026, 1, 1))
    return found, learn(lambda talk, tools, asked: found.render(talk, tools=tools, generation_prompt=asked))


def written(found: ChatTemplate, message: Message) -> str:
    """Return what a model writes, so that the template has the message as the last turn."""
    before: Conversation = (Message("user", "hello"),)
    asked = found.render(before, tools=TOOLS, generation_prompt=True)
    whole = found.render((*before, message), tools=TOOLS)
    if not whole.startswith(asked):  # a prompt that opens reasoning, and a turn without any
        asked = asked.removesuffix("<think>\n")
    assert whole.startswith(asked)
    return whole[len(asked) :].removesuffix("<|im_end|>\n").removesuffix("<|call|>").removesuffix("<|return|>")


def bare(calls: tuple[Call, ...]) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def cases() -> Iterator[tuple[str, str, tuple[Call, ...], str]]:
    for name in FORMATS:
        for calls in ((LOOK_UP,), (PING,), (DIGITS,), (LOOK_UP, DIGITS, PING)):
            if name == "text-arguments" or name not in ONE_CALL or len(calls) == 1:
                yield name, "", calls, ""
        if name not in ONE_CALL and name != "channels":
            yield name, "So be it.", (DIGITS,), "I think:\n\nit is so."
        yield name, "", (DIGITS,), "I think."
        yield name, "Plain < text [with] {marks}.", (), "I think."
        yield name, "Plain text.", (), ""


@pytest.mark.parametrize(("name", "text", "calls", "thought"), list(cases()))
def test_what_a_template_writes_is_read_back(name: str, text: str, calls: tuple[Call, ...], thought: str) -> None:
    found, form = made(FORMATS[name])
    if name == "qwen3-coder" and not thought:
        thought = "I think."  # its prompt opens reasoning
    raw = written(found, Message("assistant", text, calls, reasoning=thought))
    read = form.read(raw, TOOLS)
    assert (read.reasoning, read.text, bare(read.calls)) == (thought, text, bare(calls)), raw
    assert form.read(raw).calls == ()


PIECES = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", ">", "\n", "{", "}", "[", "]", '"', "'", ",",
    ":", "look_up", "ping", "(", ")", "=", "name", "arguments", "<think>", "</think>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", '<invoke name="', '<parameter name="', '" string="', "</invoke>", "[TOOL_CALLS]", "[ARGS]",
    "<|call|>", "<|sep|>", "<|python_start|>", "<|channel|>", "<|message|>", "<|start|>", "assistant to=functions.",
    "<|START_ACTION|>", "1e999", "NaN", "\\ud800", "\ud800", "\\", "é", "\0", "-", "9" * 5000, "commentary", "<call>", "<sep>",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_raises_and_what_is_read_is_json_that_a_tokenizer_takes(name: str) -> None:
    found, form = made(FORMATS[name])
    draw, whole = random.Random(name), written(found, Message("assistant", "", (LOOK_UP,), reasoning="r"))
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(300)]
    texts += [whole[:a] + draw.choice(PIECES) + whole[b:] for a in range(0, len(whole), 3) for b in (a, a + 2)]
    texts += [whole[:cut] for cut in range(0, len(whole), 2)]
    texts += [whole.replace(a, b) for a in ("{", '"', ">", "<", "[") for b in ("", a * 3)]
    for text in texts:
        for call in form.read(text, TOOLS).calls:
            assert isinstance(json.loads(call.arguments), dict)
            (call.name + call.arguments).encode()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("piece", ["[", "{", '{"a":', "(", "<parameter=a>", '\\"', "<tool_call>", "<|call|>x<|sep|>", "x(", "[TOOL_CALLS]x"])  # fmt: skip
def test_long_and_deep_text_is_read_in_time_that_grows_with_it(name: str, piece: str) -> None:
    found, form = made(FORMATS[name])
    begin = written(found, Message("assistant", "", (LOOK_UP,), reasoning="r"))[:40]
    for text in (piece * 20_000, begin + piece * 20_000):
        form.read(text, TOOLS)


def test_a_damaged_call_is_content() -> None:
    _, form = made(HERMES)
    for damaged in (
        '<tool_call>{"name": "ping"}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": [',
        "<tool_call>ping",
    ):
        read = form.read(f"I call {damaged}", TOOLS)
        assert (read.text, read.calls) == (f"I call {damaged}", ())


def test_reasoning_that_has_no_end_is_reasoning() -> None:
    _, form = made(FORMATS["qwen3-coder"])
    assert form.read("I still think", TOOLS).reasoning == "I still think"
    _, form = made(HERMES)
    assert form.read("<think>\nI still think", TOOLS).reasoning == "I still think"


def test_a_call_within_reasoning_that_has_no_end_is_a_call() -> None:
    found, form = made(FORMATS["qwen3-coder"])
    call = written(found, Message("assistant", "", (PING,), reasoning="r")).partition("</think>")[2]
    read = form.read(f"I think.{call}", TOOLS)
    assert (read.reasoning, bare(read.calls)) == ("I think.", [("ping", {})])


def test_the_schema_decides_what_text_without_quotes_is() -> None:
    _, form = made(FORMATS["glm"])
    text = "<tool_call>{}\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    for key, value, wanted in (
        ("word", "3", "3"), ("limit", "3", 3), ("how", '{"a": 1}', {"a": 1}), ("how", "{'a': None}", {"a": None}),
        ("exact", "True", True), ("other", "plain words", "plain words"), ("limit", "1e999", "1e999"),
    ):  # fmt: skip
        (call,) = form.read(text.format("look_up", key, value), TOOLS).calls
        assert json.loads(call.arguments) == {key: wanted}, value


@pytest.mark.parametrize(
    ("source", "why"),
    [("{% for m in messages %}{{ m.content }}{% endfor %}", "leaves them out"), ("{{ raise_exception('no') }}", "no")],
)
def test_a_template_without_tools_says_why(source: str, why: str) -> None:
    assert why in made(source)[1].why


def test_calls_that_a_template_does_not_show_stay_in_the_content_that_it_gets() -> None:
    _, form = made(HEAD + "{{ m.content }}" + TAIL.replace("%s", "").replace("<|im_end|>\n{% endif %}", "<|im_end|>\n{% endif %}")
                   .replace("{% if add_generation_prompt %}", "{% if tools %}Use <tool_call></tool_call>.{% endif %}"
                            "{% if add_generation_prompt %}"))  # fmt: skip
    text = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert bare(form.read(text, TOOLS).calls) == [("ping", {})]
    assert (form.shown(text, TOOLS).text, form.shown(text, TOOLS).calls) == (text, ())
