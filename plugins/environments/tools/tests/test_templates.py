"""Tool calls in the format of a model's own chat template, with the real tokenizer and recorder."""

import asyncio
import json

import pytest
from tool_episodes import made

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.data.records import Sampling
from whet.errors import ConfigError
from whet.plugins.registry import load_plugins
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_chat.tokenizer import ChatTokenizer
from whet_env_tools.config import ToolUseConfig, facts
from whet_testing.fakes import FakeGenerator
from whet_testing.playing import make_player

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
JSON = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
CALLS = {
    JSON: ('<tool_call>{"name": "slowly", "arguments": {"number": 21}}</tool_call>', "{"),
    XML: (
        "<tool_call>\n<function=slowly>\n<parameter=number>\n21\n</parameter>\n</function>\n</tool_call>",
        "<function=slowly>",
    ),
}


@pytest.mark.parametrize("form", [JSON, XML], ids=["json", "xml"])
def test_calls_and_results_are_written_as_the_template_has_them(form, tmp_path, tiny_model_folder):
    chat = ChatTokenizer(tiny_model_folder, HEAD + form + TAIL)
    call, damaged = CALLS[form]
    environment = made(tmp_path, "slowly", calls_by="template", turns=3)
    tasks = environment.tasks("test")

    def episode(*texts):
        generator = FakeGenerator(list(texts), chat)
        player = make_player(generator, chat, sampling=Sampling(max_tokens=400, stop_tokens=chat.stop_tokens))
        assignment = Assignment(Route("tool-use", environment, "test"), tasks[0], 0, 0)
        return asyncio.run(player.episode(assignment, 0))

    try:
        found = episode(f"I ask.\n{call}{call}", r"\boxed{42}")
        assert found.rewards == {"correct": 1.0, "calls": 2.0, "wrong_calls": 0.0, "failed_calls": 0.0}
        (one,) = found.trajectories
        text = chat.decode(one.tokens, skip_special=False)
        assert text.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "slowly"')
        assert text.count("<tool_response>42</tool_response>") == 2
        trained = chat.decode(one.tokens[one.loss_mask], skip_special=False)
        assert trained == rf"I ask.{chr(10)}{call}{call}<|im_end|>\boxed{{42}}<|im_end|>"
        damage = episode(f"<tool_call>{damaged}", "never")  # what cannot be read as a call is the answer
        assert damage.rewards["calls"] == 0.0
        assert damage.turns == 1
    finally:
        environment.close()


def test_a_template_that_knows_no_tools_is_refused_before_the_run(tmp_path, tiny_model_folder):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "Q", "answer": "A"}) + "\n")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    document = {"dataset": str(tmp_path / "tasks.jsonl"), "python": {}}
    config = structure(document, ToolUseConfig, load_plugins())
    model = ModelInfo(str(tiny_model_folder), {}, chat_template=plain)
    with pytest.raises(ConfigError, match=r"chat template knows no tools: .*, or set calls_by: text"):
        facts(config, model)
    assert facts(structure({**document, "calls_by": "text"}, ToolUseConfig, load_plugins()), model).states_answers
    assert facts(config, ModelInfo(str(tiny_model_folder), {}, chat_template=HEAD + JSON + TAIL)).states_answers
