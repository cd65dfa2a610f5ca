"""Calls of tools as chat templates write them: what one writes is read back, and nothing else is taken for a call."""

import json
from datetime import datetime

import pytest

from whet.data.messages import Call, Message
from whet.data.templates import ChatTemplate
from whet.errors import DataError
from whet_endpoint.call_format import CallFormat, call_format

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant"
)
TAIL = (
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{%% for c in m.tool_calls or [] %%}{%% if c.function %%}{%% set c = c.function %%}{%% endif %%}%s{%% endfor %%}"
)
QWEN = (
    HEAD + "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    + CALLS % '{{ "\n" }}<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
    + TAIL
)  # fmt: skip
"""As Qwen 2.5 has it."""
REASONING = (
    HEAD + "\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content or '' }}"
    + CALLS % '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>' + TAIL
)  # fmt: skip
"""As Qwen 3 does, which makes up empty reasoning for the last turn."""
LLAMA = (
    HEAD + "\n{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}' + TAIL
)
MISTRAL = (
    HEAD + "\n{{ m.content or '' }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + TAIL
)
NAME_FIRST = (
    HEAD + "\n{{ m.content or '' }}{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}<call>function<sep>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```</call>\n{% endfor %}</calls>{% endif %}"
    + TAIL
)  # fmt: skip
"""As DeepSeek does."""
ARGUMENTS_AS_TEXT = (
    HEAD
    + "\n{{ m.content or '' }}"
    + CALLS % '[[{{ {"name": c.name, "input": c.arguments | tojson} | tojson }}]]'
    + TAIL
)  # fmt: skip
XML = HEAD + "\n{{ m.content or '' }}" + CALLS % "<call={{ c.name }}>{{ c.arguments.values() | join }}</call>" + TAIL
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MUTE = QWEN.partition("{% endif %}")[2]
KNOWN = {
    "qwen": QWEN, "reasoning": REASONING, "llama": LLAMA, "mistral": MISTRAL, "name first": NAME_FIRST,
    "arguments as text": ARGUMENTS_AS_TEXT,
}  # fmt: skip

TOOL = json.dumps({"type": "function", "function": {"name": "add", "parameters": {}}})
ADD = Call("", "add", '{"a": 1, "b": {"c": ["\\"}", "é </tool_call> <call>"]}}')
NOTHING = Call("", "nothing", "{}")


def render(source: str, *messages: Message) -> str:
    template = ChatTemplate(source, {}, datetime(2026, 1, 1))
    return template.render((Message("user", "hello"), *messages), tools=(TOOL,))


def found(source: str) -> CallFormat:
    template = ChatTemplate(source, {}, datetime(2026, 1, 1))
    return call_format(lambda talk, tools: template.render(talk, tools=tools))


def written(source: str, text: str, *calls: Call) -> str:
    """Give a turn as a template has it: between the header, with reasoning that it makes up, and the end."""
    named = tuple(Call("123456789", call.name, call.arguments) for call in calls)
    turn = render(source, Message("assistant", text, named)).rpartition("<|im_start|>assistant\n")[2]
    return turn.removeprefix("<think>\n\n</think>\n\n").removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    form = found(KNOWN[name])
    assert form.read(written(KNOWN[name], "", ADD)) == ("", (ADD,))
    assert form.read(written(KNOWN[name], "", NOTHING)) == ("", (NOTHING,))
    if name != "llama":
        assert form.read(written(KNOWN[name], "So be it.", ADD, NOTHING, ADD)) == ("So be it.", (ADD, NOTHING, ADD))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    "text", ["", "hello", "{}", "{", "[", '{"name": "add"}', "[[[[" * 10_000, '{"name": 1, "parameters": {}}', "null"]
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    form = found(KNOWN[name])
    for answer in (text, form.marker + text, f"{form.marker} {text}", f"a {form.marker}{text} b"):
        assert form.read(answer) == (answer, ())


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_that_was_cut_is_text(name: str) -> None:
    form, whole = found(KNOWN[name]), written(KNOWN[name], "", ADD)
    cut = whole[: whole.index('"}') + 2]
    assert form.read(cut) == (cut, ())


def test_white_space_is_the_models_own_affair() -> None:
    for source, text in (
        (
            QWEN,
            'so <tool_call>{"arguments":{"a":1},"name":"add"}</tool_call><tool_call>\n\n{"name":"x","arguments":{}}',
        ),
        (MISTRAL, 'so[TOOL_CALLS][{"name":"add","arguments":{"a":1}},{"name":"x","arguments":{}}]'),
        (NAME_FIRST, 'so <calls> <call>function<sep>add```json{"a":1}```</call><call>function<sep> x ```json {}'),
    ):
        assert found(source).read(text) == ("so", (Call("", "add", '{"a": 1}'), Call("", "x", "{}"))), text


def test_where_nothing_stands_before_a_call_the_answer_must_be_calls_alone() -> None:
    form, call = found(LLAMA), '{"name": "x", "parameters": {}}'
    assert form.marker == ""
    assert form.read(f" {call}\n") == ("", (Call("", "x", "{}"),))
    assert len(form.read(f"{call}; {call}")[1]) == 2
    for text in (f"I call {call}", f"{call} for you"):
        assert form.read(text) == (text, ())


@pytest.mark.parametrize(
    ("source", "why"),
    [(PLAIN, "it leaves them out"), (MUTE, "it leaves them out"), (XML, "it does not write their calls as JSON"),
     ("{{ raise_exception('no tools here') }}", "no tools here")],
    ids=["plain", "mute", "xml", "refusing"],
)  # fmt: skip
def test_a_template_that_knows_no_tools_is_told(source: str, why: str) -> None:
    with pytest.raises(DataError, match=f"the model's chat template knows no tools: .*{why}.*model.chat_template"):
        found(source)
