from whet.data.records import Task
from whet_env_tools.calculator import Calculator
from whet_env_tools.config import CalculatorConfig
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class TestPlugin(ComponentContract):
    hooks = "whet_env_tools.hooks"


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
