"""The environment keeps the contract of environments, and its rewards are what its README says."""

from whet_env_reverse import environment
from whet_env_reverse.config import ReverseConfig

from whet.data.records import Task
from whet_testing.contracts.environment import EnvironmentContract


class TestReverse(EnvironmentContract):
    splits = ("train", "test")
    full_reward = 1.1

    def make(self):
        return environment.build(ReverseConfig(letters=5, words=20))

    def gold(self, task: Task) -> str:
        return task.data["answer"]


def test_the_answer_to_an_example_by_hand():
    data = {"answer": "rats"}
    assert environment.correct(" rats\n", data) == 1.0
    assert environment.correct("rats.", data) == 0.0
    assert environment.in_place("rots", data) == 0.75
    assert environment.in_place("rat", data) == 0.0


def test_the_splits_have_different_words():
    made = environment.build(ReverseConfig(letters=8))
    train, test = ({task.data["answer"] for task in made.tasks(split)} for split in ("train", "test"))
    assert not train & test
