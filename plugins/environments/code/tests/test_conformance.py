import json
import re
from functools import cache

import pytest

from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_env_code.config import CodeConfig, TinyFunctionsConfig
from whet_env_code.environment import Code
from whet_env_code.tiny_functions import Function, TinyFunctions, demonstrations
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract

installed = cache(load_plugins)

FUNCTIONS = {
    "double": ("n", "n * 2", "the double of n", [(3, 6), (-1, -2)]),
    "is_even": ("n", "n % 2 == 0", "whether n is even", [(3, False), (4, True)]),
    "last": ("items", "items[-1]", "the last of items", [([1, 2], 2), ("abc", "c")]),
    "ends": (
        "text",
        "(text[0], text[-1])",
        "the first and the last character",
        [("abc", ("a", "c")), ("x", ("x", "x"))],
    ),
}


def record(name):
    argument, result, words, cases = FUNCTIONS[name]
    lines = "".join(f"    assert candidate({given!r}) == {wanted!r}\n" for given, wanted in cases)
    return {
        "prompt": f"def {name}({argument}):\n    '''Return {words}.'''\n",
        "canonical_solution": f"    return {result}\n",
        "test": f"def check(candidate):\n{lines}",
        "entry_point": name,
    }


class TestPlugin(ComponentContract):
    hooks = "whet_env_code.hooks"
    documents = {"code": {"dataset": "made-up.jsonl"}}


class TestCode(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False
    mentions_win = True  # of several programs the one with the wanted function counts, and of several such the last
    settings = {}

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.dataset = {}
        for split, names in (("train", ("double", "is_even", "ends")), ("test", ("last",))):
            self.dataset[split] = str(tmp_path / f"{split}.jsonl")
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(record(name)) + "\n" for name in names))

    def make(self):
        return Code(structure({"dataset": self.dataset, **self.settings}, CodeConfig, installed()))

    def gold(self, task):
        return f"```python\n{task.data['before']}    return {FUNCTIONS[task.data['name']][1]}\n```"

    def wrong(self, task):
        before = task.data["before"]
        return (
            "passed", "All tests passed.", f"```python\n{before}    import os; os._exit(0)\n```",
            f"```python\n{before}    pass\n```", f"```python\n{before}    raise SystemExit(0)\n```",
            "```python\nassert True\n```",
        )  # fmt: skip


class TestPartialCreditAndTool(TestCode):
    settings = {"partial_weight": 0.5, "turns": 3}
    full_reward = 1.5

    def gold(self, task):
        return ["```run\nx = 6 * 7\nprint(x)\n```", super().gold(task)]


class TestTinyFunctions(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False
    gold_samples = 6

    def make(self):
        return TinyFunctions(structure({}, TinyFunctionsConfig, installed()))

    def gold(self, task):
        return written(task).program()

    def wrong(self, task):
        return (written(task).program(careful=False), "def f(n): return 0", "passed")


def written(task):
    return Function(*map(int, re.findall(r"\d", task.prompt[-1].text)))


def test_demonstrations_are_careful_and_careless_and_of_no_held_out_function():
    records = list(demonstrations(400, seed=3))
    texts = [[message["content"] for message in record["messages"]] for record in records]
    assert 0.4 < sum("abs" in program for _, program in texts) / len(texts) < 0.6
    assert not any(Function(*map(int, re.findall(r"\d", question))).held_out for question, _ in texts)
