import json
from pathlib import Path

import pytest

from whet.config.structure import structure
from whet.data.records import Task
from whet.plugins.registry import load_plugins
from whet_env_tools.calculator import Calculator
from whet_env_tools.config import CalculatorConfig, ToolUseConfig
from whet_env_tools.environment import ToolUse
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class TestPlugin(ComponentContract):
    hooks = "whet_env_tools.hooks"
    documents = {"tool-use": {"dataset": "made-up.jsonl"}}


class TestCalculator(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True

    def make(self) -> Calculator:
        return Calculator(CalculatorConfig())

    def gold(self, task: Task) -> list[str]:
        return [f"calc {task.id}", f"\\boxed{{{task.data['answer']}}}"]


class TestCalculatorAnsweredAtOnce(TestCalculator):
    def gold(self, task: Task) -> list[str]:
        return [f"\\boxed{{{task.data['answer']}}}"]


class TestToolUse(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.dataset = {}
        for split, numbers in (("train", (3, 4, 5)), ("test", (7,))):
            self.dataset[split] = str(tmp_path / f"{split}.jsonl")
            records = ({"question": f"What is {n}*{n}?", "answer": str(n * n)} for n in numbers)
            Path(self.dataset[split]).write_text("".join(json.dumps(record) + "\n" for record in records))

    def make(self) -> ToolUse:
        functions = [f"{Path(__file__).with_name('some_tools.py')}:slowly"]
        document = {"dataset": self.dataset, "functions": functions, "turns": 3}
        return ToolUse(structure(document, ToolUseConfig, load_plugins()))

    def gold(self, task: Task) -> list[str]:
        call = '<tool_call>{"name": "slowly", "arguments": {"number": 1}}</tool_call>'
        return [call, f"So it is \\boxed{{{task.data['answer']}}}."]
