"""Records whose messages have tool calls and reasoning in fields, with the templates of models that write them."""

import json
import re
from datetime import datetime
from decimal import Decimal

import jinja2
import pytest

from whet.config.sections import DataFile, DataSection
from whet.data.messages import Call, Message
from whet.errors import DataError
from whet.plugins.features import chats
from whet_data.demonstrations import encode
from whet_data.offline import OfflineData
from whet_data.preferences import encode_pair
from whet_data.readers import read
from whet_data.turns import conversation_of, tools_of

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
ASKED, TOLD = {"role": "user", "content": "3+4?"}, {"role": "tool", "tool_call_id": "c1", "content": "7"}
CALLS = {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]}
SAYS = {"role": "assistant", "reasoning_content": "It said 7.", "content": "It is 7."}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: a tool\n{% endfor %}"
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and 'user' not in roles[loop.index:] %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen 3's: earlier reasoning is dropped when the user speaks again."""
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return chats().ChatTokenizer(tiny_model_folder, TEMPLATE)


def trained(chat, record, **options) -> list[str]:
    found = encode(record, chat, {}, **options)
    return [chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) for one in found]


def test_calls_and_reasoning_are_trained_on_as_the_template_writes_them(chat):
    record = {"messages": [ASKED, CALLS, TOLD, SAYS], "tools": [ADD]}
    (text,) = trained(chat, record)
    assert text == f"<think>I add.</think>{WRITTEN}<think>It said 7.</think>It is 7.<|im_end|>"
    (sequence,) = encode(record, chat, {})
    assert chat.decode(sequence["tokens"], skip_special=False).startswith("add: a tool\n<|im_start|>user\n3+4?")
    assert trained(chat, record, train_on="last") == ["<think>It said 7.</think>It is 7.<|im_end|>"]
    completion = {"prompt": record["messages"][:3], "completion": [SAYS], "tools": [ADD]}
    assert trained(chat, completion) == ["<think>It said 7.</think>It is 7.<|im_end|>"]


@pytest.mark.parametrize("tools", [[], [ADD]], ids=["no tools", "tools"])
def test_a_template_is_compiled_once_for_all_records(tiny_model_folder, monkeypatch, tools):
    compiled, compile_template = [], jinja2.Environment.from_string
    spy = lambda self, source: compiled.append(source) or compile_template(self, source)  # noqa: E731
    monkeypatch.setattr(jinja2.Environment, "from_string", spy)
    chat = chats().ChatTokenizer(tiny_model_folder, TEMPLATE)
    for _ in range(3):
        trained(chat, {"messages": [ASKED, {"role": "assistant", "content": "7"}], "tools": tools})
    assert compiled == [TEMPLATE]


def test_a_turn_is_trained_with_its_reasoning_though_the_template_drops_it_later(chat):
    """Each turn is trained once. None is trained without the reasoning that the record has."""
    texts = trained(chat, {"messages": [ASKED, CALLS, TOLD, SAYS, ASKED, {**SAYS, "content": "Still 7."}]})
    assert texts == [
        f"<think>I add.</think>{WRITTEN}<think>It said 7.</think>It is 7.<|im_end|>",
        "<think>It said 7.</think>Still 7.<|im_end|>",
    ]


@pytest.mark.parametrize(
    "message",
    [
        CALLS,
        {**CALLS, "content": "", "thinking": None, "tool_call_id": None, "function_call": None},
        {**CALLS, "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}]},
        {**CALLS, "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 3, "b": 4}}]},
        {**CALLS, "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "reasoning": "I add.", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "thinking": "I add.", "tool_calls": [CALL]},
    ],
)
def test_the_forms_of_data_sets_are_one(message):
    call = Call("c1", "add", '{"a": 3, "b": 4}')
    assert conversation_of([message]) == (Message("assistant", "", (call,), reasoning="I add."),)


def test_tools_are_a_list_or_its_text_with_or_without_what_is_around_them():
    forms = ([ADD], json.dumps([ADD]), [ADD["function"]], [json.dumps(ADD)], json.dumps([json.dumps(ADD["function"])]))
    assert {tools_of(form) for form in forms} == {(json.dumps(ADD),)}


def test_records_of_a_table_have_the_arguments_and_tools_of_the_same_records_as_lines(chat, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    records = []
    for name, arguments in (("weather", {"city": "Paris", "at": {"hour": 3}}), ("calc", {"expr": "3+4", "of": [1]})):
        kinds = {key: {"type": "string", f"{key}_only": {"of": name}} for key in arguments}
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": kinds}}}
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        records.append({"messages": [ASKED, turn, TOLD, {"role": "assistant", "content": "7"}], "tools": [tool]})
    lines, columns = tmp_path / "records.jsonl", tmp_path / "records.parquet"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    parquet.write_table(table.from_pylist(records), columns)
    as_lines, as_table = ([row.record for row in read(DataFile(str(file)))] for file in (lines, columns))
    assert as_lines != as_table
    for one, other in zip(as_lines, as_table, strict=True):
        assert conversation_of(one["messages"]) == conversation_of(other["messages"])
        assert tools_of(one["tools"]) == tools_of(other["tools"])
        assert trained(chat, one) == trained(chat, other)


def test_calls_and_tools_that_a_library_stored_as_objects_of_lists_are_lists(chat):
    call = {"id": ["c1"], "type": ["function"], "function": [CALL["function"]]}
    messages = [ASKED, {**CALLS, "tool_calls": call}, TOLD, {**SAYS, "tool_calls": {"id": [], "function": []}}]
    columns = {key: [message.get(key) for message in messages] for key in ("role", "content", *CALLS)}
    tools = {"type": ["function"], "function": [ADD["function"]]}
    wanted = {"messages": [ASKED, CALLS, TOLD, SAYS], "tools": [ADD]}
    for given in (messages, columns):
        assert conversation_of(given)[:2] == conversation_of(wanted["messages"])[:2]
        assert trained(chat, {"messages": given, "tools": tools}) == trained(chat, wanted)
    one = {"role": "user", "content": "3+4?"}
    assert conversation_of(one) == conversation_of([one])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (datetime(2024, 1, 2), "Object of type datetime is not JSON"),
        (Decimal("1.5"), "Object of type Decimal is not JSON"),
        (b"1", "Object of type bytes is not JSON"),
        (float("nan"), "Out of range float values are not JSON"),
        (float("inf"), "Out of range float values are not JSON"),
    ],
)
def test_a_value_that_json_cannot_hold_is_one_malformed_record(chat, value, words):
    call = {"name": "book", "arguments": {"when": {"is": [value]}}}
    tool = {"name": "book", "parameters": {"default": value}}
    for record, what in (
        ({"messages": [ASKED, {**CALLS, "tool_calls": [call]}]}, "the arguments of a call of 'book' are {'when': "),
        ({"messages": [ASKED, SAYS], "tools": [tool]}, "a tool is {'type': "),
    ):
        with pytest.raises(DataError, match=f"{re.escape(what)}.*which JSON cannot hold: {words}.*as text"):
            encode(record, chat, {})


def test_a_date_in_a_call_of_a_table_is_counted_with_its_row(chat, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    call = {"id": "c1", "function": {"name": "book", "arguments": {"when": datetime(2024, 1, 2)}}}
    rows = [{"messages": [ASKED, {"role": "assistant", "content": "7", "tool_calls": calls}]} for calls in ([], [call])]
    parquet.write_table(table.from_pylist(rows), tmp_path / "a.parquet")
    section = DataSection([DataFile(str(tmp_path / "a.parquet"))], max_bad_records=0.5)
    report = OfflineData(section, chat, 0, 0).prepare(lambda record, chat: encode(record, chat, {})).report
    assert (report.records, report.sequences, report.malformed) == (2, 1, 1)
    assert report.examples[0].startswith("a.parquet:row 2: the arguments of a call of 'book' are {'when': ")


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": -Infinity}', '{"a": "\\ud800"}'])
def test_arguments_as_text_are_json_that_any_reader_takes(chat, arguments):
    with pytest.raises(DataError, match=r"the arguments of a call of 'add'.*(JSON cannot hold|half of a character)"):
        encode({"messages": [ASKED, {**CALLS, "tool_calls": [{"name": "add", "arguments": arguments}]}]}, chat, {})


def test_null_in_json_text_is_kept():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}
    assert tools_of(json.dumps([tool])) == tools_of([json.dumps(tool)]) == (json.dumps(tool),)
    call = {"function": {"name": "add", "arguments": '{"a": null}'}}
    for calls in ([call], json.dumps([call]), json.dumps([{"name": "add", "arguments": {"a": None}}])):
        (message,) = conversation_of([{"role": "assistant", "tool_calls": calls}])
        assert message.calls[0].arguments == '{"a": null}'


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [ASKED, {**CALLS, "tool_calls": [{"function": {}}]}]}, "a tool call is"),
        ({"messages": [ASKED, {**CALLS, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "is no JSON"),
        ({"messages": [ASKED, {**CALLS, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, "wanted an object"),
        ({"messages": [ASKED, {**CALLS, "tool_calls": "add"}]}, "tool_calls: 'add' is no JSON"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}, SAYS]}, "a message of 'user' has tool calls"),
        ({"messages": [ASKED, {**SAYS, "reasoning_content": 3}]}, "reasoning of a message is 3"),
        ({"messages": [ASKED, CALLS, {**TOLD, "tool_call_id": 3}, SAYS]}, "`tool_call_id` of a message is 3"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "must be a string or a list of parts"),
        ({"messages": [ASKED, {**SAYS, "function_call": {"name": "add"}}]}, "`function_call`.*wanted `tool_calls`"),
        ({"messages": [ASKED, SAYS], "tools": {"add": 1}}, "wanted a list"),
        ({"messages": [ASKED, SAYS], "tools": [{"name": 3}]}, "wanted a function with a name"),
    ],
)
def test_a_damaged_field_is_named(chat, record, words):
    with pytest.raises(DataError, match=words):
        encode(record, chat, {})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [ASKED, CALLS, TOLD, SAYS]}, "leaves out the tool call 'add'"),
        ({"messages": [ASKED, SAYS]}, "leaves out the reasoning 'It said 7.'"),
        ({"messages": [ASKED, {"role": "assistant", "content": "7"}], "tools": [ADD]}, "leaves out the tool 'add'"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tiny_model_folder, record, words):
    plain = chats().ChatTokenizer(tiny_model_folder)
    with pytest.raises(DataError, match=words):
        encode(record, plain, {})
    if len(record["messages"]) == 2:
        pair = {"prompt": [ASKED], "chosen": [record["messages"][1]], "rejected": "8", "tools": record.get("tools")}
        with pytest.raises(DataError, match=words):
            encode_pair(pair, plain, {})


THINKS = "<think>{{ m.reasoning_content }}</think>"


@pytest.mark.parametrize(
    ("shows", "is_refused"),
    [
        ("", True),
        ("<think></think>", True),
        ("<think>{{ m.reasoning_content[:60] }}</think>", True),
        ("<think>{{ m.reasoning_content.split('\n')[-1] }}</think>", True),
        (THINKS, False),
        ("<think>{{ m.reasoning_content | trim | tojson }}</think>", False),
    ],
)
def test_reasoning_that_the_template_leaves_out_is_refused_though_its_words_stand_elsewhere(
    tiny_model_folder, shows, is_refused
):
    chat = chats().ChatTokenizer(tiny_model_folder, TEMPLATE.replace(THINKS, shows))
    asked = {"role": "user", "content": "A whetstone costs 3 dollars and another one 4. What do both cost?"}
    thinks = {"role": "assistant", "reasoning_content": asked["content"] + " I add:\n3 + 4 = 7.", "content": "7"}
    pair = {"prompt": [asked], "chosen": [thinks], "rejected": "8"}
    for record, encoder in (({"messages": [asked, thinks]}, encode), (pair, encode_pair)):
        if not is_refused:
            assert "I add:" in chat.decode(encoder(record, chat, {})[0]["tokens"])
            continue
        with pytest.raises(DataError, match="leaves out the reasoning 'A whetstone costs"):
            encoder(record, chat, {})


def test_a_call_that_the_template_leaves_out_is_refused_though_its_name_stands_in_the_tools(tiny_model_folder):
    begin, end = TEMPLATE.index("{% for c in m.tool_calls"), TEMPLATE.index("<|im_end|>\n{% endfor %}{% if add_gen")
    chat = chats().ChatTokenizer(tiny_model_folder, TEMPLATE[:begin] + TEMPLATE[end:])
    answer = {"role": "assistant", "content": "I did add."}
    with pytest.raises(DataError, match="leaves out the tool call 'add'"):
        encode({"messages": [ASKED, CALLS, TOLD, answer], "tools": [ADD]}, chat, {})
    pair = {"prompt": [ASKED], "chosen": [{**CALLS, "content": "I add."}], "rejected": [answer], "tools": [ADD]}
    with pytest.raises(DataError, match="leaves out the tool call 'add'"):
        encode_pair(pair, chat, {})


LISTS = "{% for tool in tools or [] %}{{ tool.function.name }}: a tool\n{% endfor %}"
LISTS_ONE = "{% for tool in (tools or [])[:1] %}{{ tool.function.name }}: a tool\n{% endfor %}"
LISTS_AT_THE_END = "{% if tools and messages[-1].role == 'user' %}{{ tools | tojson }}{% endif %}"
KNOWS = (
    "{% if tools and tools[0].function.name != 'add' %}{{ raise_exception('unknown') }}{% endif %}"
    "{{ tools | tojson if tools }}"
)
SUBTRACT = {"type": "function", "function": {"name": "subtract", "description": "Unlike add."}}


@pytest.mark.parametrize(
    ("listing", "tools", "missing"),
    [
        ("", [ADD], "add"),
        ("{{ 'You have tools.' if tools }}", [ADD], "add"),
        (LISTS_ONE, [ADD, SUBTRACT], "subtract"),
        (LISTS_AT_THE_END, [ADD], "add"),
        (LISTS, [ADD, SUBTRACT], ""),
        ("{{ tools | tojson if tools }}", [ADD["function"], SUBTRACT], ""),
        (KNOWS, [ADD], ""),
    ],
)
@pytest.mark.parametrize("said", [CALLS, {"role": "assistant", "content": "7"}], ids=["called", "not called"])
def test_a_tool_that_the_template_leaves_out_is_refused_though_its_name_stands_elsewhere(
    tiny_model_folder, listing, tools, missing, said
):
    chat = chats().ChatTokenizer(tiny_model_folder, TEMPLATE.replace(LISTS, listing))
    asked = {"role": "user", "content": "Please add 3 and 4, and subtract nothing."}
    pair = {"prompt": [asked], "chosen": [said], "rejected": "8", "tools": tools}
    for record, encoder in (({"messages": [asked, said], "tools": tools}, encode), (pair, encode_pair)):
        if not missing:
            assert "add" in chat.decode(encoder(record, chat, {})[0]["tokens"])
            continue
        with pytest.raises(DataError, match=f"leaves out the tool '{missing}'"):
            encoder(record, chat, {})


SPEAK = "{% if m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}"
REFUSES = SPEAK + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
GREETS = "{% if m.role == 'system' %}A system.{% endif %}{% if m.role == 'tool' %}{{ m.content }}{% endif %}" + SPEAK
ANSWER = {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (
            SPEAK,
            [{"role": "system", "content": "Be brief."}, ASKED, ANSWER],
            "leaves out the system message 'Be brief.'",
        ),
        (SPEAK, [ASKED, ANSWER, TOLD, ANSWER], "leaves out the result of a tool '7'"),
        (REFUSES, [{"role": "system", "content": "Be brief."}, ASKED, ANSWER], "refuses a conversation.*no system"),
        (GREETS, [{"role": "system", "content": "Be brief."}, ASKED, ANSWER], "leaves out the system message"),
        (GREETS, [ASKED, ANSWER, TOLD, ANSWER], ""),
        (SPEAK, [ASKED, ANSWER], ""),
    ],
)
def test_messages_of_a_role_that_the_template_leaves_out_are_refused(tiny_model_folder, template, messages, words):
    chat = chats().ChatTokenizer(tiny_model_folder, "{% for m in messages %}" + template + "{% endfor %}")
    pair = {"prompt": messages[:-1], "chosen": [messages[-1]], "rejected": "8"}
    for record, encoder in (({"messages": messages}, encode), (pair, encode_pair)):
        if not words:
            encoder(record, chat, {})
            continue
        with pytest.raises(DataError, match=words):
            encoder(record, chat, {})


def test_whether_a_template_leaves_out_a_role_is_found_once(chat, monkeypatch):
    rendered, own = [], chat.render
    monkeypatch.setattr(chat, "render", lambda talk, **options: rendered.append(talk) or own(talk, **options))
    record = {"messages": [{"role": "system", "content": "Be brief."}, ASKED, ANSWER]}
    counts = []
    for _ in range(3):
        encode(record, chat, {})
        counts.append(len(rendered))
    assert counts[1] - counts[0] == counts[2] - counts[1] == counts[0] - 2


def test_pairs_have_calls_too(chat):
    pair = {"prompt": [ASKED], "chosen": [CALLS], "rejected": [SAYS], "tools": [ADD]}
    chosen, rejected = encode_pair(pair, chat, {})
    assert chat.decode(chosen["tokens"][chosen["loss_mask"]], skip_special=False) == f"<think>I add.</think>{WRITTEN}"
    assert rejected["prompt_length"] == chosen["prompt_length"]
