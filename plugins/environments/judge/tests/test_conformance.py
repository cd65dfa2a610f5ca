import pytest

from whet_env_judge.config import Criterion, JudgeConfig, RubricJudgeConfig
from whet_env_judge.judge import Judge
from whet_env_judge.rubric import RubricJudge
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.responding import ScriptedResponder, selected


class Length:
    """A judge to whom short answers are worth more."""

    async def value(self, messages, cut=False):
        return -float(len(messages[-1].text))


class TestPlugin(ComponentContract):
    hooks = "whet_env_judge.hooks"
    documents = {
        "judge": {"dataset": "made-up.jsonl"},
        "rubric-judge": {"dataset": "made-up.jsonl", "rubric": [{"name": "brief", "text": "It is brief."}]},
    }


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
        return Judge(JudgeConfig(environment=selected("arithmetic")), {"judge": Length()})


class TestTheSumOfBoth(EnvironmentContract):
    splits = ("train", "test")
    full_reward = 1.5

    def make(self):
        config = JudgeConfig(
            environment=selected("arithmetic"),
            environment_weight=1.0,
            judge_weight=0.5,
            clip=(-1.0, 1.0),
            mean=-40.0,
        )
        return Judge(config, {"judge": Length()})

    def gold(self, task):
        return f"\\boxed{{{task.data['answer']}}}"


def grade(messages):
    """Score a response by its length, and prefer the shorter one."""
    text = messages[-1].text
    if "# Response A" in text:
        a, b = (len(text.partition(f"# Response {name}\n")[2].partition("\n\n")[0]) for name in "AB")
        return "Better: tie" if a == b else f"Better: {'A' if a < b else 'B'}"
    return f"Score: {len(text) % 11}"


class TestRubricAndPrompts(TestPrompts):
    def make(self):
        criteria = [Criterion("brief", "It is brief."), Criterion("right", "It is right.", 0.5)]
        config = RubricJudgeConfig(dataset=self.dataset, rubric=criteria, votes=2, temperature=1.0)
        return RubricJudge(config, {"judge": ScriptedResponder(grade)})


class TestRankedPrompts(TestPrompts):
    def make(self):
        config = RubricJudgeConfig(dataset=self.dataset, rubric="It is brief.", compare="rank", pairs=2)
        return RubricJudge(config, {"judge": ScriptedResponder(grade)})


class TestRubricAndAnotherEnvironment(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True
    full_reward = 1.5

    def make(self):
        config = RubricJudgeConfig(
            environment=selected("arithmetic"), environment_weight=1.0, judge_weight=0.5, rubric="It is brief."
        )
        return RubricJudge(config, {"judge": ScriptedResponder("Score: 10")})

    def gold(self, task):
        return f"\\boxed{{{task.data['answer']}}}"
