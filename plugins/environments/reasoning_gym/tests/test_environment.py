"""Episodes of the environment `reasoning-gym` against the library itself, and answers that attack its scorers."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from whet.config.structure import structure
from whet.errors import ConfigError, DataError
from whet.interfaces.undecided import noted
from whet.plugins.registry import load_plugins
from whet_env_reasoning_gym.config import HALF, ReasoningGymConfig
from whet_env_reasoning_gym.environment import ReasoningGym, problem
from whet_sandbox.provider import SandboxBroken
from whet_testing.fakes import FakeModel

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

EVALUATING = ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens", "countdown", "puzzle24",
              "polynomial_multiplication", "simple_integration", "intermediate_integration")  # fmt: skip
MIXED = {"datasets": [{"name": name, "weight": 1} for name in (*EVALUATING, "prime_factorization", "spell_backward")]}
Made = Callable[..., ReasoningGym]


def config(**settings: Any) -> ReasoningGymConfig:
    return structure({"test_tasks": 8, "scorers": 1, **settings}, ReasoningGymConfig, load_plugins())


@pytest.fixture(scope="module")
def mixed() -> Iterator[ReasoningGym]:
    """All data sets whose scorers evaluate answers, and two others, in one process."""
    environment = ReasoningGym(config(dataset="composite", config=MIXED, limits={"cpu_seconds": 1, "memory_mib": 1024}))
    yield environment
    environment.close()


def of(environment: ReasoningGym, source: str) -> Any:
    return next(task for task in environment.tasks("train")[:200] if task.data["source"] == source)


def played(environment: ReasoningGym, task: Any, answer: str) -> tuple[dict[str, float], list[str]]:
    async def play() -> tuple[dict[str, float], list[str]]:
        with noted() as reasons:
            return dict(await environment.run(task, FakeModel(f"Well. <answer>{answer}</answer>"))), reasons

    return asyncio.run(play())


BY_THE_LIBRARY = """
import json, sys
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
names, splits = json.loads(sys.argv[1])
specs, told = [DatasetSpec(name, 1, {}) for name in names], []
for split, seed, size in splits:
    data = reasoning_gym.create_dataset("composite", seed=seed, size=size, datasets=specs)
    for index in range(6):
        entry, scores = data[index], []
        for answer in (str(entry["answer"]), "[[1, 0], [0, 1]]", "12"):
            try:
                scores.append([answer, data.score_answer(answer=answer, entry=entry)])
            except ValueError:  # prime_factorization wants numbers
                scores.append([answer, 0.0])
        told.append([split, index, entry["question"], str(entry["answer"]), scores])
print(json.dumps(told))
"""


def test_tasks_and_scores_are_the_librarys_own(mixed):
    names, splits = [one["name"] for one in MIXED["datasets"]], [("train", 0, 1_000_000), ("test", HALF, 8)]
    command = [sys.executable, "-c", BY_THE_LIBRARY, json.dumps([names, splits])]
    # polynomial_multiplication follows the order of a set, and with it the seed of Python's hashes
    hashes = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=hashes, timeout=200, check=True)
    for split, index, question, right, scores in json.loads(done.stdout):
        task = mixed.tasks(split)[index]
        assert task.prompt[-1].text == question
        assert task.data["answer"] == right
        for answer, score in scores:
            assert played(mixed, task, answer)[0]["score"] == score


@pytest.mark.parametrize("source", EVALUATING)
def test_an_answer_that_is_a_program_scores_like_none(mixed, source):
    task = of(mixed, source)
    none = asyncio.run(mixed.run(task, FakeModel("no answer")))["score"]
    for answer in ("__import__('os').write(5, b'{\"score\": 1}')", "exec(chr(49))", "oracle_answer"):
        rewards, reasons = played(mixed, task, answer)
        assert rewards["score"] == none <= 0.01
        assert rewards["failed"] == 0
        assert not reasons


def test_an_error_of_a_scorer_is_score_0_and_counted(mixed):
    rewards, reasons = played(mixed, of(mixed, "prime_factorization"), "two times three")
    assert (rewards["score"], rewards["failed"]) == (0, 1)
    assert "ValueError" in reasons[0]


@pytest.mark.parametrize("answer", ["9**9**9**9", "factorial(10**8)", "2**(10**10)"])
def test_an_answer_that_takes_forever_or_all_memory_is_score_0_and_counted(mixed, answer):
    task = of(mixed, "countdown")
    rewards, reasons = played(mixed, task, answer)
    assert rewards["score"] <= 0.01
    assert len(reasons) == rewards["failed"]
    assert played(mixed, task, task.data["answer"])[0]["score"] == 1


def test_a_task_is_the_same_in_another_process_and_the_splits_differ():
    made = []
    for _ in range(2):
        environment = ReasoningGym(config(dataset="spell_backward", seed=7))
        made.append([repr(environment.tasks(split)[i].prompt) for split in ("train", "test") for i in range(8)])
        environment.close()
    assert made[0] == made[1]
    assert len(set(made[0])) == 16


def test_a_threshold_makes_the_reward_0_or_1():
    environment = ReasoningGym(config(dataset="countdown", threshold=0.05))
    try:
        assert environment.reward_weights == {"score": 0, "correct": 1, "failed": 0}
        task = environment.tasks("test")[0]
        assert played(environment, task, "1 + 1")[0]["correct"] == 1
        assert played(environment, task, "nonsense")[0]["correct"] == 0
    finally:
        environment.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "game_of_life_halting"},
        {"dataset": "composite", "config": {"datasets": [{"name": "game_of_life_halting"}]}},
    ],
)
def test_the_data_set_that_rewards_anything_is_refused(settings):
    with pytest.raises((ConfigError, ValueError), match="any answer"):
        config(**settings)


def test_seed_and_size_are_set_beside_the_data_sets_own_options():
    with pytest.raises((ConfigError, ValueError), match="use seed beside"):
        config(dataset="countdown", config={"seed": 1})


def test_wrong_names_and_options_are_problems_before_a_run():
    where, reason = problem(config(dataset="count_down"))
    assert where == "dataset"
    assert "countdown" in reason
    where, reason = problem(config(dataset="countdown", config={"numbers": 3}))
    assert where == "config"
    assert "'numbers'" in reason


def test_a_missing_library_is_a_problem_before_a_run(tmp_path):
    sandbox = {"use": "namespaces", "packages": [str(tmp_path)]}
    where, reason = problem(config(dataset="countdown", sandbox=sandbox))
    assert where == "use"
    assert "pip install reasoning-gym" in reason


def test_a_system_message_is_the_librarys_or_ones_own():
    for system, expected in (("direct", "Answer the question directly."), ("Be brief.", "Be brief."), ("", None)):
        environment = ReasoningGym(config(dataset="gcd", system=system))
        prompt = environment.tasks("test")[0].prompt
        environment.close()
        assert prompt[0].text.startswith(expected) if expected else len(prompt) == 1
    environment = ReasoningGym(config(dataset="gcd", system="deepseek"))
    with pytest.raises(DataError, match="DeepSeekZero"):
        environment.tasks("test")
    environment.close()


def test_a_library_that_cannot_start_is_infrastructure_and_no_score(tmp_path):
    package = tmp_path / "packages" / "reasoning_gym"  # pytest's own folder is closed to sandboxes
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('the disk is full')\n")
    environment = ReasoningGym(config(dataset="gcd", sandbox={"use": "namespaces", "packages": [str(package.parent)]}))
    with pytest.raises(SandboxBroken, match="the disk is full"):
        environment.tasks("test")
    environment.close()
