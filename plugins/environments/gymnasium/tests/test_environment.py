"""Games of the environment `gymnasium` against Gymnasium itself, and environments that do things wrong."""

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from whet.config.structure import structure
from whet.errors import DataError, EpisodeError, InfrastructureError
from whet.plugins.registry import load_plugins
from whet_env_gymnasium.actions import Actions, actions_of
from whet_env_gymnasium.config import GymnasiumConfig
from whet_env_gymnasium.environment import Gymnasium, problem
from whet_sandbox.served import with_installed
from whet_testing.fakes import FakeModel

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
OWN = '''
import os, time
import gymnasium
from gymnasium import spaces

class Own(gymnasium.Env):
    """Does in its second step what `does` says."""
    observation_space = spaces.Text(20)

    def __init__(self, does="", action="discrete"):
        self.does = does
        kinds = {"discrete": spaces.Discrete(2, start=1), "multi": spaces.MultiDiscrete([2, 3]), "text": spaces.Text(5)}
        self.action_space = kinds[action]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return (os.urandom(4).hex() if self.does == "differ" else "begun"), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 2:
            if self.does == "crash":
                os._exit(3)
            if self.does == "hang":
                time.sleep(3600)
            if self.does == "raise":
                raise RuntimeError("a broken board")
            if self.does == "eat":
                self.held = [bytearray(b"x" * (1 << 26)) for _ in range(64)]
            if self.does == "lie":
                return "x", float("nan"), True, False, {}
        ended = self.steps == 3
        return f"after {action}", 0.5, ended, False, ({"is_success": True} if ended else {})

gymnasium.register("Own-v0", Own)
'''


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Settings with which games import a module of one's own."""
    (tmp_path / "packages").mkdir()  # pytest's own folder is closed to other users, and sandboxes run as one
    (tmp_path / "packages" / "own_game.py").write_text(OWN)
    installed = with_installed(config(id="x").sandbox).config.packages
    return {
        "id": "own_game:Own-v0",
        "sandbox": {"use": "namespaces", "packages": [*installed, str(tmp_path / "packages")]},
    }


def config(**settings: Any) -> GymnasiumConfig:
    return structure({"test_tasks": 4, "sandboxes": 1, **settings}, GymnasiumConfig, load_plugins())


def acting(words: Iterable[str]) -> FakeModel:
    given = itertools.chain(words, itertools.repeat("nothing"))
    return FakeModel(lambda messages: f"I go. <action>{next(given)}</action>")


def played(words: Iterable[str], index: int = 0, **settings: Any) -> tuple[dict[str, float], list[str], Any]:
    environment, model = Gymnasium(config(**settings)), acting(words)
    try:
        task = environment.tasks("test")[index]
        rewards = dict(asyncio.run(environment.run(task, model)))
    finally:
        environment.close()
    return rewards, [message.text for message in model.messages if message.role == "user"], task


@pytest.mark.parametrize(
    ("game", "words", "settings"),
    [
        ("Blackjack-v1", ["hit", "hit", "stick"], {}),
        ("CliffWalking-v1", ["up", *["right"] * 11, "down"], {}),
        ("FrozenLake-v1", ["right", "down", "left", "down"], {}),
        ("Taxi-v4", ["south", "north", "pickup", "west"], {"turns": 4}),
        ("CartPole-v1", ["0", "1", "1"], {"turns": 3}),
    ],
)
def test_rewards_and_observations_are_those_of_gymnasium(game, words, settings):
    order = {"Blackjack-v1": ["stick", "hit"], "CliffWalking-v1": ["up", "right", "down", "left"],
             "FrozenLake-v1": ["left", "down", "right", "up"], "CartPole-v1": ["0", "1"],
             "Taxi-v4": ["south", "north", "east", "west", "pickup", "dropoff"]}[game]  # fmt: skip
    rewards, _, task = played(
        words,
        id=game,
        show="observation",
        observation="{0}",
        turns=len(words),
        **{k: v for k, v in settings.items() if k != "turns"},
    )
    theirs = gymnasium.make(game)
    theirs.reset(seed=task.data["seed"])
    total, ended, turns = 0.0, False, 0
    for word in words:
        if ended:
            break
        _, reward, terminated, truncated, _ = theirs.step(order.index(word))
        total, ended, turns = total + float(reward), terminated or truncated, turns + 1
    assert rewards["return"] == pytest.approx(total)
    assert rewards["turns"] == turns
    assert rewards["illegal"] == 0


def test_rendered_text_has_no_codes_of_a_terminal_and_shows_what_was_coloured():
    rewards, shown, _ = played(
        ["down", "down", "right", "right", "down", "right"], id="FrozenLake-v1", options={"is_slippery": False}
    )
    assert (rewards["return"], rewards["success"]) == (1, 1)
    assert "[S]FFF\nFHFH" in shown[0]
    assert "  (Down)\nSFFF\n[F]HFH" in shown[1]
    assert not any("\x1b" in text for text in shown)


def test_taxis_place_passenger_and_destination_are_told_in_words():
    _, shown, task = played(["south"], id="Taxi-v4", turns=1)
    theirs = gymnasium.make("Taxi-v4")
    number, _ = theirs.reset(seed=task.data["seed"])
    row, column, passenger, destination = theirs.unwrapped.decode(number)
    place = f"You are at row {row} column {column}."
    assert f"{place} The passenger is at {'RGYB'[passenger]}. The destination is {'RGYB'[destination]}." in shown[0]


def test_an_illegal_action_is_told_to_the_model_and_changes_nothing():
    rewards, shown, _ = played(
        ["fly", "down", "swim", "right"], id="FrozenLake-v1", options={"is_slippery": False}, illegal_actions=9, turns=4
    )
    assert rewards == {"return": 0, "success": 0, "illegal": 2, "turns": 4}
    assert shown[1] == "Illegal action. That is none of the actions. They are: left, down, right, up"
    assert "[F]HFH" in shown[2]


def test_a_game_ends_with_too_many_illegal_actions():
    rewards, _, _ = played(["fly"] * 9, id="FrozenLake-v1", illegal_actions=3)
    assert (rewards["illegal"], rewards["turns"]) == (3, 3)


@pytest.mark.parametrize(
    ("words", "settings", "success"),
    [
        (["fly"] * 3, {"id": "MountainCar-v0"}, 0),
        (["1"] * 2, {"id": "MountainCar-v0", "turns": 2}, 0),
        (["fly"] * 3, {"id": "CliffWalking-v1", "success_return": -20}, 0),
        (["up", *["right"] * 11, "down"], {"id": "CliffWalking-v1", "success_return": -20}, 1),
        (["1"] * 2, {"id": "MountainCar-v0", "options": {"max_episode_steps": 2}}, 1),
        (["0", "1"], {"id": "CartPole-v1", "turns": 2, "success_return": 2}, 1),
    ],
)
def test_a_game_that_is_broken_off_is_no_success_by_the_steps_that_it_did_not_pay_for(words, settings, success):
    assert played(words, **settings)[0]["success"] == success


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"id": "CliffWalking-v1"}, True),
        ({"id": "MountainCar-v0"}, True),
        ({"id": "FrozenLake-v1"}, False),
        ({"id": "Taxi-v4", "illegal_weight": -100.0}, False),
        ({"id": "Taxi-v4", "return_weight": 0.0, "success_weight": 1.0}, False),
    ],
)
def test_a_game_that_is_worth_most_unplayed_is_warned_of(settings, warned, caplog):
    environment = Gymnasium(config(**settings))
    try:
        environment.tasks("test")
    finally:
        environment.close()
    assert ("3 illegal actions are worth more than a good game" in caplog.text) is warned


def test_games_of_a_seed_are_equal_and_splits_have_other_seeds():
    found = []
    for _ in range(2):
        environment = Gymnasium(config(id="Blackjack-v1"))
        tasks = [environment.tasks(split)[i] for split in ("train", "test") for i in range(4)]
        rewards = [asyncio.run(environment.run(task, acting(["hit", "stick"]))) for task in tasks for _ in range(2)]
        environment.close()
        assert rewards[::2] == rewards[1::2]
        found.append((tasks, rewards))
    assert found[0] == found[1]
    assert len({task.data["seed"] for task in found[0][0]}) == 8


def test_many_games_are_played_at_a_time_and_do_not_disturb_each_other():
    environment = Gymnasium(config(id="FrozenLake-v1", options={"is_slippery": False}, sandboxes=2))
    task = environment.tasks("test")[0]
    won, lost = ["down", "down", "right", "right", "down", "right"], ["right", "down"]

    async def play() -> list[float]:
        plays = [environment.run(task, acting(won if i % 2 else lost)) for i in range(12)]
        return [rewards["return"] for rewards in await asyncio.gather(*plays)]

    try:
        assert asyncio.run(play()) == [0, 1] * 6
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("crash", "code 3"),
        ("hang", "'wall'"),
        ("raise", "a broken board"),
        ("eat", "memory|MemoryError"),
        ("lie", "nan"),
    ],
)
def test_an_environment_that_fails_is_infrastructure_and_no_reward(own, does, words):
    with pytest.raises(InfrastructureError, match=words):
        played(["1", "1"], options={"does": does}, step_seconds=10, memory_mib=512, **own)


def test_a_beginning_that_does_not_follow_from_the_seed_is_refused(own):
    with pytest.raises(EpisodeError, match="begins otherwise"):
        played(["1"], options={"does": "differ"}, **own)


@pytest.mark.parametrize(
    ("action", "word", "bad"), [("discrete", "2", "3"), ("multi", "1, 2", "1 3"), ("text", "abc", "abcdef")]
)
def test_own_environments_with_every_kind_of_action_and_their_own_success(own, action, word, bad):
    rewards, shown, _ = played([word, bad, word, word], options={"action": action}, **own)
    assert rewards == {"return": 1.5, "success": 1, "illegal": 1, "turns": 4}
    assert shown[1].startswith("after ")


def test_what_cannot_be_played_is_a_problem_before_a_run(tmp_path):
    assert "cannot be written as words" in problem(config(id="Pendulum-v1"))[1]
    assert "FrozenLake" in problem(config(id="FrozenLak-v1"))[1]
    assert "wanted 4 different ones" in problem(config(id="FrozenLake-v1", actions=["left", "right"]))[1]
    assert "{5}" in problem(config(id="Blackjack-v1", observation="{5}"))[1]
    assert (
        "pip install gymnasium"
        in problem(config(id="Taxi-v4", sandbox={"use": "namespaces", "packages": [str(tmp_path)]}))[1]
    )


def test_a_response_without_an_action_or_with_a_hostile_one_is_illegal():
    actions = Actions("choice", ("left", "right"))
    assert actions.read("<action>left</action> or <action> RIGHT\n</action>") == 1
    for text in (
        "left",
        "<action>left",
        "</action>left<action>",
        "<action>" * 100_000,
        "<action>" + "x" * 10_000 + "</action>",
    ):
        with pytest.raises(ValueError, match="action"):
            actions.read(text)
    for text in (
        "<action>9" + "9" * 50 + "</action>",
        "<action>1 b</action>",
        "<action></action>",
        "<action>٣</action>",
    ):
        with pytest.raises(ValueError, match="numbers"):
            Actions("numbers", ()).read(text)


def test_words_must_fit_the_actions():
    facts = {"kind": "choice", "first": 1, "count": 2}
    assert actions_of(facts, []).words == ("1", "2")
    assert actions_of(facts, ["No", "Yes"]).read("<action>yes</action>") == 2
    with pytest.raises(DataError, match="different"):
        actions_of(facts, ["a", "A"])
    with pytest.raises(DataError, match="leave it out"):
        actions_of({"kind": "text", "first": 0, "count": 0}, ["a"])
