import pytest

from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_env_gymnasium.config import GymnasiumConfig
from whet_env_gymnasium.environment import Gymnasium
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract

WAY = ("down", "down", "right", "right", "down", "right")


class TestPlugin(ComponentContract):
    hooks = "whet_env_gymnasium.hooks"
    documents = {"gymnasium": {"id": "FrozenLake-v1"}}


class TestGymnasium(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False
    answer_in_prompt = True  # the prompt names the actions
    mentions_win = True  # the last action counts
    gold_samples = 2

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls):
        """One environment for all rules: its processes take a second to start."""
        environment = cls().make()
        yield environment
        environment.close()

    def make(self):
        pytest.importorskip("gymnasium", reason="gymnasium is not installed")
        settings = {"id": "FrozenLake-v1", "options": {"is_slippery": False}, "test_tasks": 4, "sandboxes": 1}
        return Gymnasium(structure(settings, GymnasiumConfig, load_plugins()))

    def gold(self, task):
        return [f"<action>{word}</action>" for word in WAY]

    def wrong(self, task):
        return ("down", "<action>down</action>", "<action>down down right right down right</action>")
