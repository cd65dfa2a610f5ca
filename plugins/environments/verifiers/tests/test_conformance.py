"""What processes of verifiers do wrong, with a real process that does it."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError, EpisodeError, InfrastructureError
from whet_env_verifiers.config import VerifiersConfig
from whet_env_verifiers.environment import Verifiers
from whet_testing.contracts.component import ComponentContract
from whet_testing.fakes import FakeModel

STRANGE = Path(__file__).with_name("strange_process.py")


class TestPlugin(ComponentContract):
    hooks = "whet_env_verifiers.hooks"
    documents = {"verifiers": {"taskset": "made_up"}}


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that builds the environment with processes that do something wrong."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {STRANGE}\n")
    python.chmod(0o755)
    monkeypatch.setenv("STRANGE_OPENED", str(tmp_path / "opened"))
    built: list[Verifiers] = []

    def make(trouble: str, **changes: Any) -> Verifiers:
        config = VerifiersConfig(taskset="x", options={"trouble": trouble}, python=str(python), **changes)
        built.append(Verifiers(config))
        return built[-1]

    yield make
    for one in built:
        one.close()
    for line in (tmp_path / "opened").read_text().splitlines() if (tmp_path / "opened").exists() else ():
        assert not os.path.exists(f"/proc/{line}"), "a process was left"


def played(environment: Verifiers, model: FakeModel | None = None) -> dict[str, float]:
    return dict(asyncio.run(environment.run(environment.tasks("train")[0], model or FakeModel("1"))))


def test_the_reward_is_the_weighted_sum_and_its_parts_are_recorded(strange: Any) -> None:
    environment, model = strange("plays"), FakeModel("1")
    assert [task.id for task in environment.tasks("train")] == ["key 0", "key 1", "key 2"]
    assert played(environment, model) == {"right": 1.0, "m": 3.0, "reward": 2.0}
    assert environment.reward_weights == {"right": 0.0, "m": 0.0, "reward": 1.0}
    assert model.log == {"stop": "end"}
    assert [message.text for message in model.messages] == ["one?", "1"]


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("hangs", InfrastructureError, "answered nothing for"),
        ("dies", InfrastructureError, r"exited with code 3(.|\n)*ran out of luck"),
        ("sends no JSON", InfrastructureError, "sent what is no answer"),
        ("sends deep JSON", InfrastructureError, "sent what is no answer"),
        ("sends too much", InfrastructureError, "sent a message of more than 100000 bytes"),
        ("refuses", EpisodeError, "taskset x: RuntimeError: not today"),
        ("scores text", InfrastructureError, "its process answered with"),
        ("scores nothing", InfrastructureError, r"did not compute right \(scoring_timeout\)"),
        ("answers a list", InfrastructureError, "its process answered with"),
        ("answers without errors", InfrastructureError, "its process answered with"),
        ("loses the model", InfrastructureError, "ProviderError: upstream 503: gone"),
        ("breaks in a reward", EpisodeError, "TaskError: KeyError: 'x'"),
        ("has two agents", EpisodeError, "played by 2 agents"),
    ],
)
def test_what_a_process_does_wrong_is_named_and_no_reward(strange: Any, trouble: str, error: Any, words: str) -> None:
    environment = strange(trouble, seconds=1.0 if trouble == "hangs" else 60.0, message_bytes=100_000)
    for _ in range(2):  # a process that is lost is replaced
        with pytest.raises(error, match=words):
            played(environment)


def test_a_score_that_is_no_number_is_left_to_the_check_of_rewards(strange: Any) -> None:
    assert played(strange("scores NaN"))["reward"] != 1.0


def test_a_taskset_that_cannot_be_opened_ends_the_run_before_it_begins(strange: Any) -> None:
    with pytest.raises(ConfigError, match=r"'x' cannot be opened in .*ModuleNotFoundError: taskset 'x' not found"):
        strange("cannot be opened")


def test_tasks_that_change_when_a_process_is_replaced_are_refused(strange: Any) -> None:
    environment = strange("changes")
    for process in environment._processes:
        process.stop()
    with pytest.raises(InfrastructureError, match="has other tasks each time that it is loaded"):
        played(environment)


def test_an_episode_that_is_cancelled_leaves_its_process_to_others(strange: Any) -> None:
    async def cancelled(environment: Verifiers) -> None:
        async with asyncio.timeout(0.3):
            await environment.run(environment.tasks("train")[0], FakeModel("1"))

    environment = strange("waits")
    (process,) = environment._processes
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled(environment))
    assert time.monotonic() - begun < 30
    assert process.alive
    assert not process.playing
    assert process.answered("ping", {}, 30.0) is None


def test_episodes_are_spread_over_the_processes(strange: Any, tmp_path: Path) -> None:
    async def several(environment: Verifiers) -> Any:
        return await asyncio.gather(
            *(environment.run(task, FakeModel("1")) for task in environment.tasks("train") for _ in range(3))
        )

    environment = strange("plays", processes=2)
    assert all(rewards["reward"] == 2 for rewards in asyncio.run(several(environment)))
    assert len((tmp_path / "opened").read_text().splitlines()) == 2


def test_without_verifiers_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "verifiers.py").write_text("raise ImportError('this is not verifiers')")
    with pytest.raises(ConfigError, match=r"(?s)cannot be opened in .*Install verifiers 0.4 or later"):
        Verifiers(VerifiersConfig(taskset="no_such_taskset_anywhere", folders=[str(tmp_path)]))
    with pytest.raises(ConfigError, match=r"verifiers.python: is '/no/python', where there is no Python"):
        Verifiers(VerifiersConfig(taskset="x", python="/no/python"))


@pytest.mark.parametrize("taskset", ["", "a b", "x; import os", "../x"])
def test_an_id_that_is_no_module_is_refused(taskset: str) -> None:
    with pytest.raises(ValueError, match="wanted the id of a taskset"):
        VerifiersConfig(taskset=taskset)


def test_a_process_that_had_nothing_to_answer_is_not_silent(strange: Any) -> None:
    async def cancelled(environment: Verifiers) -> None:
        async with asyncio.timeout(1.5):
            await environment.run(environment.tasks("train")[0], FakeModel("1"))

    environment = strange("waits", seconds=4.0)
    (process,) = environment._processes
    environment.tasks("train")
    process.heard -= 1000.0  # as after a long training step
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled(environment))
    assert process.alive
