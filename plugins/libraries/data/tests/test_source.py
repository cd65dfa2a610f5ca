"""Prompts of a data set as an environment: right answers, and what messages have in fields."""

import asyncio
import json

import pytest

from whet_data.source import Prompts, SourceConfig
from whet_data.turns import tools_of
from whet_testing.fakes import FakeModel

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TALK = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 3}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "user", "content": "And 5+6?"},
]


def prompts(folder, record, **settings):
    (folder / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return Prompts(SourceConfig(dataset=str(folder / "a.jsonl"), **settings))


@pytest.mark.parametrize(
    ("value", "gold"), [("London", "London"), (5, "5"), (["London", "London, UK", None], ["London", "London, UK"])]
)
def test_right_answers_are_a_text_or_a_list_of_texts(tmp_path, value, gold):
    (task,) = prompts(tmp_path, {"prompt": "Where?", "facts": {"gold": value}}, gold="facts.gold").tasks("train")
    assert task.data == {"answer": gold}


def test_a_prompt_has_the_calls_of_its_messages_and_describes_the_tools_of_its_record(tmp_path):
    environment = prompts(tmp_path, {"prompt": TALK, "tools": [ADD]})
    (task,) = environment.tasks("train")
    model = FakeModel("11")
    asyncio.run(environment.run(task, model))
    (talk,) = model.forks
    assert talk.tools == tools_of([ADD])
    assert [(call.name, call.arguments) for call in talk.messages[1].calls] == [("add", '{"a": 3}')]
    assert talk.messages[2].answers == "c1"
