"""Every data set of reasoning-gym: a question of each, and its own answer scored by its own scorer in the sandbox."""

import asyncio
import json
import random
import subprocess
import sys

import pytest

from whet.config.structure import structure
from whet.interfaces.undecided import noted
from whet.plugins.registry import load_plugins
from whet_env_reasoning_gym.config import UNUSABLE, ReasoningGymConfig
from whet_env_reasoning_gym.environment import ReasoningGym
from whet_testing.fakes import FakeModel

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; `nox -s adapters` installs it")
pytestmark = pytest.mark.slow
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets whose questions have many right answers and state none."""
NAMES = "import json; from reasoning_gym.factory import DATASETS; print(json.dumps(sorted(DATASETS)))"


def first_of_each(names: list[str]) -> dict[str, int]:
    """Return the first task of each data set in a composite, which draws the data set of task i by the seed i."""
    found: dict[str, int] = {}
    for index in range(20 * len(names)):
        (drawn,) = random.Random(index).choices(range(len(names)), weights=[1] * len(names), k=1)
        found.setdefault(names[drawn], index)
    return found


def test_a_question_of_every_data_set_is_asked_and_its_own_answer_gets_the_full_reward():
    listed = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True, timeout=200)
    names = [name for name in json.loads(listed.stdout) if name != "composite" and name not in UNUSABLE]
    assert len(names) >= 100
    mixed = {"dataset": "composite", "config": {"datasets": [{"name": name, "weight": 1} for name in names]}}
    environment = ReasoningGym(
        structure({**mixed, "scorers": 2, "train_tasks": 2000}, ReasoningGymConfig, load_plugins())
    )

    async def scores(index: int) -> tuple[str, list[float], list[str]]:
        task = await asyncio.to_thread(environment.tasks("train").__getitem__, index)
        answers = [str(task.data["answer"]), "nonsense"]
        with noted() as reasons:
            played = [await environment.run(task, FakeModel(f"<answer>{answer}</answer>")) for answer in answers]
        return task.data["source"], [one["score"] for one in played], reasons

    async def play() -> list[tuple[str, list[float], list[str]]]:
        return await asyncio.gather(*map(scores, first_of_each(names).values()))

    try:
        found = asyncio.run(play())
    finally:
        environment.close()
    assert sorted(source for source, _, _ in found) == names
    assert {source for source, (own, _), _ in found if own < 1} <= WITHOUT_ANSWER
    assert not [source for source, (_, wrong), _ in found if wrong > 0.15]
    failing = {source for source, _, reasons in found if reasons}
    assert failing <= {"prime_factorization"}, "its scorer raises at text"
