"""An environment is built once its config is known, and what it lacks is refused by its name."""

import logging
from typing import Any

import pytest

from whet.component import Component, Selection
from whet.config.sections import EnvironmentSection
from whet.errors import ConfigError, PluginError
from whet.run.inputs import build_route

SOURCE = """
from types import SimpleNamespace
from attrs import frozen
from whet.data.records import Task

@frozen
class Config:
    pass

class Environment:
    {weights}

    def __init__(self, config):
        {body}

    {tasks}

    {close}
"""


def route(
    tmp_path: Any,
    weights: str = "reward_weights = {}",
    body: str = "pass",
    close: str = "def close(self): 0",
    tasks: str = 'def tasks(self, split): return [Task("2+2?", {})]',
) -> Any:
    file = tmp_path / "own.py"
    file.write_text(SOURCE.format(weights=weights, body=body, close=close, tasks=tasks))
    chosen = Selection("environments", Component("sums", dict, f"file:{file}:Environment"), None, "acme")
    return build_route(EnvironmentSection(name="adding", component=chosen), "train")


@pytest.mark.parametrize(
    "weights",
    [
        "reward_weights = {'correct': float('nan')}",
        "reward_weights = {'correct': 'high'}",
        "reward_weights = {1: 1.0}",
        "reward_weights = ['correct']",
        "def reward_weights(self): return {}",
    ],
)
def test_reward_weights_that_are_no_finite_numbers_by_name_are_refused(tmp_path: Any, weights: str) -> None:
    with pytest.raises(ConfigError, match=r"environment 'adding'.* its `reward_weights` is .*wanted an attribute or a"):
        route(tmp_path, weights)


@pytest.mark.parametrize(
    ("lacking", "name"), [({"weights": ""}, "reward_weights"), ({"close": ""}, "close"), ({"body": "wrong"}, "wrong")]
)
def test_an_environment_that_lacks_something_is_named(tmp_path: Any, lacking: dict[str, str], name: str) -> None:
    with pytest.raises(PluginError, match=f"environment 'adding' cannot be built: .*{name}") as caught:
        route(tmp_path, **lacking)
    assert caught.value.__cause__ is not None


def test_a_function_that_builds_no_environment_is_named(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def build(config): pass")
    chosen = Selection("environments", Component("sums", dict, f"file:{file}:build"), None, "acme")
    with pytest.raises(ConfigError, match=r"environment 'adding'.*own.py:build` returned None; return the environment"):
        build_route(EnvironmentSection(name="adding", component=chosen), "train")


def test_an_environment_that_fails_to_close_is_a_warning(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    route(tmp_path, close="def close(self): raise OSError('stuck')").close()
    assert "environment 'adding' could not be closed: OSError: stuck" in caplog.text
    assert "own.py" in caplog.text


def test_a_close_that_is_a_coroutine_is_a_warning(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    route(tmp_path, close="async def close(self): ...").close()
    assert "environment 'adding' could not be closed" in caplog.text
    assert "Environment.close` must neither be `async def`" in caplog.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return [{'prompt': 'a', 'answer': 'b'}]",
            "task 0 of environment 'adding' is {'prompt': 'a', 'answer': 'b'}, wanted Task",
        ),
        ("return ['a']", "task 0 of environment 'adding' is 'a', wanted Task"),
        ("from whet.data.records import Task; return [Task('a', '42')]", "with a mapping"),
        ("yield 1", r"`tasks` of environment 'adding' did nothing: `Environment.tasks` must"),
    ],
)
def test_what_is_no_task_is_named_with_its_environment(tmp_path: Any, body: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        route(tmp_path, tasks=f"def tasks(self, split): {body}")
