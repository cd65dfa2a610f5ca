"""The tool of `whet demo calculator`, and its demonstrations."""

import asyncio
import json
import time

import pytest

from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_chat.tokenizer import ChatTokenizer
from whet_data.demonstrations import trainable
from whet_env_tools.calculator import calculate, demonstrations
from whet_env_tools.config import ToolUseConfig
from whet_env_tools.environment import ToolUse
from whet_start.small_models import TOOL_TEMPLATE
from whet_testing.fakes import FakeModel
from whet_testing.hostile import HOSTILE_ANSWERS


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("47*83", 3901), (" 47 * 83 \n", 3901), ("12-47", -35), ("0+7", 7),
        ("999999999999*999999999999", 999999999998000000000001),
    ],
)  # fmt: skip
def test_expressions_are_computed(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression", ["", "47", "47*83*2", "4 7*8", "1e3*2", "-4*3", "47*", "(47)*83", "٤*3", "9" * 13 + "*1", "1/0"]
)
def test_whatever_else_is_refused_in_words(expression):
    with pytest.raises(ValueError, match=r"wanted two whole numbers|is no whole number of at most 12 digits"):
        calculate(expression)


def test_hostile_expressions_are_refused_at_once():
    began = time.process_time()
    for expression in HOSTILE_ANSWERS:
        with pytest.raises(ValueError, match="whole number"):
            calculate(expression)
    assert time.process_time() - began < 1.0


def test_demonstrations_are_episodes_of_tool_use_that_score(tmp_path, tiny_model_folder):
    records = list(demonstrations(400, seed=3))
    assert records == list(demonstrations(400, seed=3)) != list(demonstrations(400, seed=4))
    assert 160 < sum(len(record["messages"]) == 4 for record in records) < 240
    assert all(len(record["messages"]) == 2 for record in demonstrations(20, direct_share=1.0))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    document = {
        "dataset": str(tmp_path / "tasks.jsonl"), "prompt": "{question}", "turns": 2, "calls_by": "text",
        "functions": ["whet_env_tools.calculator:calculate"], "tool_prompt": "{tools}",
    }  # fmt: skip
    environment = ToolUse(structure(document, ToolUseConfig, load_plugins()))
    chat = ChatTokenizer(tiny_model_folder, TOOL_TEMPLATE)
    try:
        for record, task in zip(records[:8], environment.tasks("train"), strict=False):
            question, *calls, _ = record["messages"]
            assert task.prompt[-1].text == question["content"]
            assert json.loads(task.prompt[0].text)["function"] == record["tools"][0]  # as `tool-use` shows the tool
            replies = [json.dumps(call["function"]) for one in calls for call in one.get("tool_calls", ())]
            model = FakeModel(
                [f"<tool_call>{reply}</tool_call>" for reply in replies] + [f"\\boxed{{{record['answer']}}}"]
            )
            rewards = asyncio.run(environment.run(task, model))
            assert rewards == {"correct": 1.0, "calls": len(replies), "wrong_calls": 0.0, "failed_calls": 0.0}
            assert [m.text for m in model.messages if record["answer"] in m.text and m.role == "user"] == [
                f"<tool_response>\n{message['content']}\n</tool_response>"
                for message in calls
                if message["role"] == "tool"
            ]
            (one,) = trainable(record, chat, {})  # the template writes all of it, and only appends
            text = chat.decode(one.tokens[one.loss_mask], skip_special=False)
            assert text.count("<|im_end|>") == len(replies) + 1
            assert ('<tool_call>{"name": "calculate", "arguments": {"expression": "' in text) == bool(replies)
    finally:
        environment.close()
