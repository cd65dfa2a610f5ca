import csv
import json

import pytest

from whet.data.messages import Call, Message
from whet.data.records import gold_answer
from whet.errors import DataError
from whet.plugins.features import chats
from whet_data.source import Prompts, SourceConfig

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TALK = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompts(tmp_path, *records, **options) -> Prompts:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Prompts(SourceConfig(dataset=str(file), **options))


def test_a_prompt_keeps_its_tool_calls_and_reasoning(tmp_path, tiny_model_folder):
    (task,) = prompts(tmp_path, {"prompt": TALK, "tools": []}).tasks("train")
    assert task.prompt[1].calls == (Call("c1", "add", '{"a": 3, "b": 4}'),)
    shown = chats().ChatTokenizer(tiny_model_folder, TEMPLATE).render(task.prompt, generation_prompt=True)
    assert 'I add.{"name": "add", "arguments": {"a": 3, "b": 4}}' in shown


def test_a_cell_of_a_table_may_have_the_json_text_of_a_prompt(tmp_path):
    turns = ([{"role": "user", "content": "6*7?"}], [{"from": "human", "value": "6*7?"}])
    with (file := tmp_path / "prompts.csv").open("w") as stream:
        csv.writer(stream).writerows([["prompt"], *([json.dumps(one)] for one in turns), ["[6*7]?"]])
    found = Prompts(SourceConfig(dataset=str(file))).tasks("train")
    assert [task.prompt for task in found] == [(Message("user", text),) for text in ("6*7?", "6*7?", "[6*7]?")]
    (found,) = prompts(tmp_path, {"prompt": json.dumps(turns[0])}).tasks("train")
    assert found.prompt == (Message("user", json.dumps(turns[0])),), "a text of JSON lines stays text"


def test_a_prompt_that_is_a_number_is_refused_with_its_column(tmp_path):
    words = r"prompts.jsonl:1: the column 'sum' \(prompt\) must be text or a list of messages, found the number 7"
    with pytest.raises(DataError, match=words):
        prompts(tmp_path, {"sum": 7}, question="sum").tasks("train")


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_with_tools_of_its_own_is_refused(tmp_path, packed):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the column `tools` has tools"):
        prompts(tmp_path, {"prompt": TALK, "tools": json.dumps(tools) if packed else tools}).tasks("train")


@pytest.mark.parametrize("gold", ["anwser", "answer.value", "reward.truth"])
def test_a_field_of_answers_that_no_record_has_is_refused(tmp_path, gold):
    rows = [{"prompt": "6*7?", "answer": {"text": "42"}, "reward": '{"ground_truth": "42"}'}] * 2
    with pytest.raises(DataError, match=rf"no record .* '{gold}' .* columns 'prompt', 'answer', 'reward'"):
        prompts(tmp_path, *rows, gold=gold).tasks("train")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("answer", {"answer": 42}), ("a.b", {"a.b": 42}), ("a.b", {"a": {"b": 42}}), ("a.b", {"a": '{"b": 42}'})],
)
def test_the_field_of_answers_is_read_and_a_record_may_lack_it(tmp_path, gold, answer):
    tasks = prompts(tmp_path, {"prompt": "Hi."}, {"prompt": "6*7?", **answer}, gold=gold).tasks("train")
    assert [gold_answer(task) for task in tasks] == [None, "42"]


def test_a_field_that_a_dot_leads_into_is_no_text(tmp_path):
    with pytest.raises(DataError, match=r"before 'b' in 'a\.b' \(`gold`\): 'forty' is no JSON"):
        prompts(tmp_path, {"prompt": "6*7?", "a": "forty"}, gold="a.b").tasks("train")


SYSTEM = {"role": "system", "content": "In French."}


@pytest.mark.parametrize(
    ("record", "options", "system"),
    [
        ({"system": "In French."}, {}, "In French."),
        ({"system": "In French."}, {"system": "Be brief."}, "In French."),
        ({"prompt": [SYSTEM, *TALK]}, {"system": "Be brief."}, "In French."),
        ({"prompt": [SYSTEM, *TALK], "system": "Be brief."}, {}, "In French."),
        ({"system": None}, {"system": "Be brief."}, "Be brief."),
        ({"system": "42"}, {"system": "Be brief.", "gold": "system"}, "Be brief."),
        ({}, {}, ""),
    ],
)
def test_a_prompt_has_the_system_message_of_its_record_or_else_that_of_the_config(tmp_path, record, options, system):
    (task,) = prompts(tmp_path, {"prompt": "6*7?", **record}, **options).tasks("train")
    assert [message.text for message in task.prompt if message.role == "system"] == [system] * bool(system)
    assert task.prompt[0].role == ("system" if system else "user")


def test_a_prompt_with_images_is_refused(tmp_path):
    with pytest.raises(DataError, match="the column `images` has images"):
        prompts(tmp_path, {"prompt": "6*7?", "images": ["a.png"]}).tasks("train")
