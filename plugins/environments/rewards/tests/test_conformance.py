from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from whet.config.structure import structure
from whet.data.records import Task
from whet.plugins.registry import load_plugins
from whet_env_rewards.config import RewardedConfig
from whet_env_rewards.rewarded import Rewarded
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract

installed = cache(load_plugins)


def rewarded(document: Mapping[str, Any]) -> Rewarded:
    return Rewarded(structure(document, RewardedConfig, installed()))


class TestPlugin(ComponentContract):
    hooks = "whet_env_rewards.hooks"
    documents = {
        "rewarded": {"dataset": "made-up.jsonl", "rewards": [{"use": "tag-format"}]},
        "all-of": {"of": [{"use": "tag-format"}]},
        "any-of": {"of": [{"use": "tag-format"}]},
        "overlong": {"longest": 9, "buffer": 3},
        "cosine-length": {"longest": 9},
        "json-schema": {"schema": {"type": "object"}},
    }


class TestRewardedArithmetic(EnvironmentContract):
    splits = ("train", "test")
    states_answers = True
    full_reward = 1.0

    @pytest.fixture(autouse=True)
    def needed(self) -> None:
        pytest.importorskip("whet_env_math", reason="whet-env-math is not installed")

    def make(self) -> Rewarded:
        rewards = [{"use": "repetition", "weight": -1}, {"use": "group-length", "weight": 0}]
        return rewarded({"environment": {"use": "arithmetic"}, "truncation_factor": 0.5, "rewards": rewards})

    def gold(self, task: Task) -> str:
        return f"\\boxed{{{task.data['answer']}}}"
