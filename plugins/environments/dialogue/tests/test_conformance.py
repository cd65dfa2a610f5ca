import json

import pytest

from whet_env_dialogue.config import SimulatedUserConfig
from whet_env_dialogue.simulated_user import SimulatedUser
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.responding import ScriptedResponder, selected


class TestPlugin(ComponentContract):
    hooks = "whet_env_dialogue.hooks"
    documents = {"simulated-user": {"dataset": "made-up.jsonl"}}


def user(messages):
    """Ask again once, end, and be satisfied by a response with the city of the scenario."""
    text = messages[-1].text
    if "is the whole conversation" in text:
        city = text.partition("you knew:\n")[2].partition("\n")[0].removeprefix("The capital is ").rstrip(".")
        *_, last = text.partition("\n\nDid the assistant")[0].split("Assistant:")
        return f"Satisfied: {'yes' if f'> {city}' in last.splitlines() else 'no'}"
    return ("Where is it?", "Are you sure?", "[END]")[len(messages) // 2]


class TestSimulatedUser(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False
    full_reward = 2.0

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.dataset = {}
        for split, cities in (("train", ("Paris", "Rome", "Lima")), ("test", ("Oslo", "Bern"))):
            self.dataset[split] = str(tmp_path / f"{split}.jsonl")
            rows = [{"scenario": f"The capital is {city}.", "city": city} for city in cities]
            rows[0]["opening"] = "Hello! Which one?"
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(self):
        config = SimulatedUserConfig(dataset=self.dataset, gold="city", gold_match="exact", turns=3)
        return SimulatedUser(config, {"user": ScriptedResponder(user)})

    def gold(self, task):
        return task.data["answer"]


class TestJudgedDialogue(TestSimulatedUser):
    full_reward = 3.0

    def make(self):
        rubric = pytest.importorskip("whet_env_judge.rubric", reason="whet-env-judge is not installed")
        within = selected("simulated-user", dataset=self.dataset, gold="city", gold_match="exact", turns=3)
        config = rubric.RubricJudgeConfig(environment=within, environment_weight=1.0, rubric="The assistant is polite.")
        return rubric.RubricJudge(config, {"user": ScriptedResponder(user), "judge": ScriptedResponder("Score: 10")})
