"""Tasksets of verifiers itself, unmodified. Skipped where no interpreter has it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.data.records import Task
from whet.errors import ConfigError, EpisodeError
from whet_env_verifiers.config import VerifiersConfig
from whet_env_verifiers.environment import Verifiers
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.fakes import FakeModel

sys.path.insert(0, str(Path(__file__).parent))
from verifiers_found import TASKSETS, WHY_NOT, interpreter

sys.path.remove(str(Path(__file__).parent))

PYTHON = interpreter()
pytestmark = [pytest.mark.skipif(PYTHON is None, reason=WHY_NOT), pytest.mark.slow]


def opened(taskset: str, **changes: Any) -> Verifiers:
    return Verifiers(VerifiersConfig(taskset=taskset, python=PYTHON or "", folders=[str(TASKSETS)], **changes))


def played(environment: Verifiers, answers: Any, index: int = 0) -> tuple[dict[str, float], FakeModel]:
    model = FakeModel(answers)
    return dict(asyncio.run(environment.run(environment.tasks("train")[index], model))), model


@pytest.fixture(scope="module")
def sums() -> Any:
    environment = opened("vf_sums", test_tasks=8)
    yield environment
    environment.close()


class TestSums(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False
    full_reward = 1.5
    gold_samples = 3

    @pytest.fixture(autouse=True)
    def _sums(self, sums: Verifiers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sums, "close", lambda: None)  # opening takes seconds, so the tests share one
        self.sums = sums

    def make(self) -> Verifiers:
        return self.sums

    def gold(self, task: Task) -> str:
        return str(2 * int(task.prompt[-1].text.split()[0]))


def test_rewards_metrics_and_prompts_are_those_of_the_taskset(sums: Verifiers) -> None:
    assert [message.text for message in sums.tasks("train")[1].prompt] == ["Answer with a number.", "2 plus 2?"]
    assert (len(sums.tasks("train")), len(sums.tasks("test"))) == (32, 8)
    rewards, model = played(sums, "4", index=1)
    assert rewards == {"correct": 1.0, "short": 1.0, "letters": 1.0, "reward": 1.5}
    assert sums.reward_weights == {"correct": 0.0, "short": 0.0, "letters": 0.0, "reward": 1.0}
    assert [(message.role, message.text) for message in model.messages] == [
        ("system", "Answer with a number."), ("user", "2 plus 2?"), ("assistant", "4")
    ]  # fmt: skip


def test_a_reward_that_raises_is_no_reward(sums: Verifiers) -> None:
    with pytest.raises(EpisodeError, match=r"taskset vf_sums: TaskError: .*RuntimeError: the scorer broke"):
        played(sums, "break")


def test_an_overfull_context_ends_the_episode_and_what_there_is_is_scored(sums: Verifiers) -> None:
    model = FakeModel("4", room=0)
    rewards = dict(asyncio.run(sums.run(sums.tasks("train")[0], model)))
    assert rewards["correct"] == 0


def test_many_episodes_at_a_time_keep_their_own_conversations(sums: Verifiers) -> None:
    async def several() -> list[Any]:
        models = [FakeModel(str(2 * (i + 1))) for i in range(16)]
        tasks = sums.tasks("train")
        return await asyncio.gather(*(sums.run(tasks[i], model) for i, model in enumerate(models)))

    assert [rewards["correct"] for rewards in asyncio.run(several())] == [1.0] * 16


def test_tools_of_a_taskset_are_called_and_a_taskset_without_end_is_cut() -> None:
    environment = opened("vf_shelf", tasks=20)
    try:
        assert len(environment.tasks("train")) == 20
        calls = [{"name": name, "arguments": {"shelf": 11}} for name in ("tools_look", "jump")]
        said = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
        rewards, model = played(environment, [*said, "7"])
    finally:
        environment.close()
    assert rewards["reward"] == 1.0
    assert [message.text for message in model.messages if message.role == "tool"] == [
        "7 books", "error: there is no tool 'jump'; there are tools_look"
    ]  # fmt: skip


def test_a_harness_that_executes_what_the_model_writes_is_refused_on_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"the harness bash executes what the model writes, .*set agent.runtime"):
        opened("vf_sums", agent={"harness": {"id": "bash"}})


def test_a_taskset_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'vf_nothing' cannot be opened in .*taskset 'vf_nothing' not found"):
        opened("vf_nothing")
