from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.data.records import Task
from whet_env_math.arithmetic import Arithmetic
from whet_env_math.config import ArithmeticConfig, MathConfig
from whet_env_math.dataset import MathDataset
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class TestPlugin(ComponentContract):
    hooks = "whet_env_math.hooks"
    documents = {"math": {"dataset": "made-up.jsonl"}}


class TestArithmetic(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True

    def make(self) -> Arithmetic:
        return Arithmetic(ArithmeticConfig())

    def gold(self, task: Task) -> str:
        return f"\\boxed{{{task.data['answer']}}}"


class MathContract(EnvironmentContract):
    """Uses one environment for all tests of a class: its graders take a second to start."""

    config: MathConfig
    states_answers = True
    deadline_seconds = 60.0

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls, data: None) -> Iterator[MathDataset]:
        environment = MathDataset(cls.config)
        yield environment
        environment.close()

    def make(self) -> MathDataset:
        return MathDataset(self.config)

    def gold(self, task: Task) -> str:
        return f"So the answer is \\boxed{{{task.data['answer']}}}."


class TestGsm8k(MathContract):
    splits = ("train", "test")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def data(cls, shared_data: Path) -> None:
        files = {split: str(shared_data / f"gsm8k_{split}.jsonl") for split in cls.splits}
        cls.config = MathConfig(dataset=files, max_records=40)


@pytest.mark.slow
class TestFormulas(MathContract):
    """Answers that only math-verify can compare: every one goes to a grader process."""

    full_reward = 1.1

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def data(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        answers = ["\\\\frac{1}{2}", "\\\\sqrt{2}", "x^2+1", "\\\\{1, 2\\\\}", "(1, 2)", "\\\\pi/3"]
        lines = [f'{{"question": "What is it?", "answer": "{answer}"}}\n' for answer in answers]
        file = tmp_path_factory.mktemp("formulas") / "train.jsonl"
        file.write_text("".join(lines))
        cls.config = MathConfig(dataset={"train": str(file)}, boxed_only=True, format_weight=0.1)
