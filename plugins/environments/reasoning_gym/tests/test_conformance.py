import re

import pytest

from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_env_reasoning_gym.config import ReasoningGymConfig
from whet_env_reasoning_gym.environment import ReasoningGym
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract


class TestPlugin(ComponentContract):
    hooks = "whet_env_reasoning_gym.hooks"
    documents = {"reasoning-gym": {"dataset": "chain_sum"}}


class TestReasoningGym(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True
    mentions_win = True  # the library takes the last answer, and scores one that holds the right one in part
    gold_samples = 4

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls):
        """One environment for all rules: its processes take a second to start."""
        environment = cls().make()
        yield environment
        environment.close()

    def make(self):
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
        settings = {"dataset": "chain_sum", "train_tasks": 1000, "test_tasks": 8, "scorers": 1}
        return ReasoningGym(structure(settings, ReasoningGymConfig, load_plugins()))

    def gold(self, task):
        terms = re.findall(r"[+-]? ?\d+", task.prompt[-1].text.partition(":")[2] or task.prompt[-1].text)
        return f"<answer>{sum(int(term.replace(' ', '')) for term in terms)}</answer>"

    def wrong(self, task):
        return (task.data["answer"], f"<answer>{int(task.data['answer']) + 1}</answer>", "<answer></answer>")
