import pytest

from whet.component import Selection
from whet.plugins.registry import load_plugins
from whet_env_judge.config import JudgeConfig
from whet_env_judge.judge import Judge
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class Length:
    """A judge to whom short answers are worth more."""

    async def value(self, messages, cut=False):
        return -float(len(messages[-1].text))


def environment(name):
    component = load_plugins().find("environments", name).component
    return Selection("environments", component, component.config())


class TestPlugin(ComponentContract):
    hooks = "whet_env_judge.hooks"
    documents = {"judge": {"dataset": "made-up.jsonl"}}


class TestPrompts(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.dataset = {}
        for factor, split in enumerate(self.splits, start=6):
            self.dataset[split] = str(tmp_path / f"{split}.jsonl")
            (tmp_path / f"{split}.jsonl").write_text(f'{{"prompt": "{factor}*7?"}}\n{{"prompt": "{factor}*9?"}}\n')

    def make(self):
        return Judge(JudgeConfig(dataset=self.dataset), {"judge": Length()})


class TestAnotherEnvironment(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True

    def make(self):
        return Judge(JudgeConfig(environment=environment("arithmetic")), {"judge": Length()})


class TestTheSumOfBoth(EnvironmentContract):
    splits = ("train", "test")
    full_reward = 1.5

    def make(self):
        config = JudgeConfig(
            environment=environment("arithmetic"),
            environment_weight=1.0,
            judge_weight=0.5,
            clip=(-1.0, 1.0),
            mean=-40.0,
        )
        return Judge(config, {"judge": Length()})

    def gold(self, task):
        return f"\\boxed{{{task.data['answer']}}}"
