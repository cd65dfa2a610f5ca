import json

import pytest

from whet.data.messages import Call
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


def prompts(tmp_path, *records) -> Prompts:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Prompts(SourceConfig(dataset=str(file)))


def test_a_prompt_keeps_its_tool_calls_and_reasoning(tmp_path, tiny_model_folder):
    (task,) = prompts(tmp_path, {"prompt": TALK, "tools": []}).tasks("train")
    assert task.prompt[1].calls == (Call("c1", "add", '{"a": 3, "b": 4}'),)
    shown = chats().ChatTokenizer(tiny_model_folder, TEMPLATE).render(task.prompt, generation_prompt=True)
    assert 'I add.{"name": "add", "arguments": {"a": 3, "b": 4}}' in shown


@pytest.mark.parametrize("packed", [False, True])
def test_a_record_with_tools_of_its_own_is_refused(tmp_path, packed):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the column `tools` has tools"):
        prompts(tmp_path, {"prompt": TALK, "tools": json.dumps(tools) if packed else tools}).tasks("train")
