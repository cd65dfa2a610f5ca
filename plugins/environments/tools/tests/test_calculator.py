import asyncio

import pytest

from whet.component import Problem
from whet.config.sections import Config
from whet.config.structure import structure
from whet.data.records import Task
from whet.errors import DataError
from whet.plugins.registry import load_plugins
from whet_env_tools.calculator import Calculator, demonstrations, held_out
from whet_env_tools.config import CalculatorConfig
from whet_env_tools.hooks import whet_check_config
from whet_testing.fakes import FakeModel


def play(answers, config=CalculatorConfig(), task=None):  # noqa: B008 - frozen
    environment, model = Calculator(config), FakeModel(answers)
    rewards = asyncio.run(environment.run(task or Task("Compute 47*83.", {"answer": "3901"}), model))
    return rewards, [(m.role, m.text) for m in model.messages]


def test_an_episode_with_a_call_has_two_turns():
    rewards, messages = play(["calc 47*83", "\\boxed{3901}"])
    assert rewards == {"correct": 1.0, "calls": 1.0}
    assert messages == [
        ("user", "Compute 47*83."),
        ("assistant", "calc 47*83"),
        ("user", "3901"),
        ("assistant", "\\boxed{3901}"),
    ]


def test_an_episode_without_a_call_has_one_turn():
    assert play(["\\boxed{3901}"])[0] == {"correct": 1.0, "calls": 0.0}
    assert play(["\\boxed{3900}"])[0] == {"correct": 0.0, "calls": 0.0}
    assert play(["3901"])[0] == {"correct": 0.0, "calls": 0.0}


def test_the_last_turn_is_the_answer_whatever_it_says():
    assert play(["calc 47*83", "calc 47*83"])[0] == {"correct": 0.0, "calls": 1.0}
    assert play(["calc 47*83"], CalculatorConfig(turns=1))[0] == {"correct": 0.0, "calls": 0.0}
    assert play(["calc 1+1", "calc 47*83", "\\boxed{3901}"], CalculatorConfig(turns=3))[0]["calls"] == 2.0


def test_the_calculator_speaks_in_the_role_of_the_config():
    _, messages = play(["calc 47*83", "\\boxed{3901}"], CalculatorConfig(reply_role="tool"))
    assert messages[2] == ("tool", "3901")


def test_calls_are_recorded_and_not_rewarded():
    assert Calculator(CalculatorConfig()).reward_weights == {"correct": 1.0, "calls": 0.0}


@pytest.mark.parametrize(
    "config", [CalculatorConfig(), CalculatorConfig(largest=9999), CalculatorConfig(system="Be brief.")]
)
def test_tasks_are_products_of_their_split(config):
    environment = Calculator(config)
    test, train = environment.tasks("test"), environment.tasks("train")
    assert len({task.id for task in test}) == len(test) == 256
    for tasks, held in ((test, True), (train[:500], False)):
        for task in tasks:
            a, b = map(int, task.id.split("*"))
            assert config.smallest <= min(a, b)
            assert max(a, b) <= config.largest
            assert held_out(a, b) == held
            assert task.data == {"answer": str(a * b)}
            assert task.prompt[-1].text == f"Compute {a}*{b}."
    assert (train[0].prompt[0].role == "system") == bool(config.system)


def test_a_range_that_leaves_a_split_empty_is_refused():
    with pytest.raises(DataError, match="from 11 to 11"):
        environment = Calculator(CalculatorConfig(largest=11))
        environment.tasks("train")[0]


def test_demonstrations_are_episodes_that_score():
    records = list(demonstrations(400, seed=3))
    assert records == list(demonstrations(400, seed=3)) != list(demonstrations(400, seed=4))
    for record in records[:60]:
        question, *rest = record["messages"]
        a, b = map(int, question["content"].removeprefix("Compute ").removesuffix(".").split("*"))
        assert not held_out(a, b)
        answers = [m["content"] for m in rest if m["role"] == "assistant"]
        rewards, messages = play(answers, task=Task(question["content"], {"answer": str(a * b)}))
        assert rewards["correct"] == 1.0
        assert messages == [(m["role"], m["content"]) for m in record["messages"]]
    called = sum(len(record["messages"]) == 4 for record in records)
    assert 160 < called < 240
    assert all(len(r["messages"]) == 2 for r in demonstrations(20, direct_share=1.0))


def test_factors_that_cannot_be_drawn_are_a_problem_of_the_config():
    document = {
        "run": {"folder": "absent", "steps": 1}, "model": {"path": "absent"}, "algorithm": "grpo", "backend": "fsdp2",
        "environments": [{"use": "calculator", "smallest": 50, "largest": 20}],
    }  # fmt: skip
    (problem,) = whet_check_config(structure(document, Config, load_plugins()))
    assert problem == Problem("environments.0.largest", "is 20, wanted at least smallest, 50")
