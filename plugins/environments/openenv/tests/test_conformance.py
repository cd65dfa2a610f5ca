import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.data.records import Reply, Task
from whet.errors import ConfigError, InfrastructureError
from whet.rollout.gate import Gate
from whet_env_openenv.actions import ActionFormat, InvalidAction
from whet_env_openenv.config import OpenEnvConfig
from whet_env_openenv.environment import OpenEnv
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.fakes import FakeModel

sys.path.insert(0, str(Path(__file__).parent))
from serving import NUMBER, TROUBLES, GuessServer, serving

sys.path.remove(str(Path(__file__).parent))

TWO: dict[str, Any] = {
    **NUMBER,
    "required": ["number", "why"],
    "properties": {**NUMBER["properties"], "why": {"type": "string"}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[GuessServer]:
    with serving(GuessServer()) as one:
        yield one


class TestPlugin(ComponentContract):
    hooks = "whet_env_openenv.hooks"
    documents = {"openenv": {"url": "http://127.0.0.1:8000"}}


class TestOpenEnv(EnvironmentContract):
    splits = ("train", "test")
    states_answers = False

    @pytest.fixture(autouse=True)
    def _server(self, server: GuessServer) -> None:
        self.server = server

    def make(self) -> OpenEnv:
        return OpenEnv(OpenEnvConfig(url=self.server.url, sessions=64))

    def gold(self, task: Task) -> str:
        return f"I think <action>{task.data['seed'] % 10}</action>"


def played(server: GuessServer, answers: Any, **changes: Any) -> tuple[dict[str, float], FakeModel]:
    environment = OpenEnv(OpenEnvConfig(url=server.url, **changes))
    model = FakeModel(answers)
    try:
        return dict(asyncio.run(environment.run(Task("", {"seed": 47}), model))), model
    finally:
        environment.close()


def told(model: FakeModel) -> list[str]:
    return [message.text for message in model.messages if message.role == "user"]


def test_an_episode_is_one_session_reset_with_the_seed_of_its_task(server: GuessServer) -> None:
    server.seen.clear()
    answers = ["<action>3</action>", "<action>9</action>", "so <action> 7 </action>"]
    rewards, model = played(server, answers, reset={"difficulty": 2})
    server.wait_until_nobody_is_connected()
    assert rewards == {"reward": pytest.approx(0.8), "invalid": 0, "done": 1, "steps": 3}
    assert "`number` (integer; a guess from 0 to 9)" in told(model)[0]
    assert [told(model)[0].splitlines()[-1], *told(model)[1:]] == ["A number from 0 to 9.", "too low", "too high"]
    assert [one.get("data") for one in server.seen] == [
        {"seed": 47, "difficulty": 2}, {"number": 3}, {"number": 9}, {"number": 7}, None
    ]  # fmt: skip


def test_the_reward_may_be_that_of_the_last_step(server: GuessServer) -> None:
    assert played(server, ["<action>3</action>", "<action>7</action>"], reward="last")[0]["reward"] == 1.0


def test_the_model_is_told_why_an_action_is_invalid_and_each_counts_as_a_turn(server: GuessServer) -> None:
    answers = ["7", "<action>seven</action>", "<action>17</action>", "<action>3</action>"]
    rewards, model = played(server, answers, turns=4)
    assert rewards == {"reward": pytest.approx(-0.1), "invalid": 3, "done": 0, "steps": 1}
    assert told(model)[1:] == [
        "Invalid action. The message has no <action>...</action>.",
        "Invalid action. number must be of the type integer.",
        "Invalid action. number: 17 is not from 0 to 9",
    ]


def test_actions_of_several_fields_are_json(server: GuessServer) -> None:
    server.schema = TWO
    try:
        rewards, model = played(server, ["<action>7</action>", '<action>{"number": 7, "why": "?"}</action>'])
        assert rewards["done"] == rewards["invalid"] == 1
        assert '"required": ["number", "why"]' in told(model)[0]
        assert "metadata" not in told(model)[0]
        assert played(server, ['So: {"number": 7}.'], within="response", action="json")[0]["done"] == 1
        assert played(server, ["7"], within="response", action="text", action_field="number")[0]["done"] == 1
        with pytest.raises(ConfigError, match=r"need 2 fields.*action_field to one of \['number', 'why'\]"):
            played(server, [], action="text")
        with pytest.raises(ConfigError, match=r"no field 'numbre'; there are \['number', 'why'\]"):
            played(server, [], action_field="numbre")
    finally:
        server.schema = NUMBER


@pytest.mark.parametrize("text", ['{"number": NaN}', "{" * 50_000, '{"a":' * 50_000 + "}", "[1]", "}{", ""])
def test_json_of_a_model_that_is_none_is_invalid(server: GuessServer, text: str) -> None:
    assert played(server, [text], within="response", action="json", turns=1)[0]["invalid"] == 1


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", " 5 ", 5), ("integer", "-07", -7), ("integer", "0" * 63 + "7 and more", None),
        ("integer", "1_0", None), ("integer", "\uff17", None), ("integer", "7.0", None), ("integer", "", None),
        ("number", "-1.5e-3", -0.0015), ("number", ".5", 0.5), ("number", "3.", 3.0), ("number", "1_0", None),
        ("number", "nan", None), ("number", "1e999", None), ("number", "0" * 63 + "7 and more", None),
    ],
)  # fmt: skip
def test_a_number_is_an_action_only_as_a_whole(kind: str, text: str, value: float | None) -> None:
    actions = ActionFormat("tag", {"properties": {"n": {"type": kind}}}, "n")
    if value is None:
        with pytest.raises(InvalidAction, match=f"n must be of the type {kind}"):
            actions.action(f"<action>{text}</action>")
    else:
        assert actions.action(f"<action>{text}</action>") == {"n": value}


def test_full_context_ends_the_episode_with_its_rewards(server: GuessServer) -> None:
    environment = OpenEnv(OpenEnvConfig(url=server.url))
    model = FakeModel(lambda _: "<action>3</action>", room=2)
    assert asyncio.run(environment.run(Task("", {"seed": 47}), model))["reward"] == pytest.approx(-0.2)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_a_server_does_wrong_is_named_and_no_reward(trouble: str) -> None:
    seconds = 0.5 if trouble == "hangs" else 30
    with serving(GuessServer(trouble)) as server:
        with pytest.raises(InfrastructureError, match=rf"OpenEnv server {server.url} \w+"):
            played(server, ["<action>7</action>"], seconds=seconds, message_bytes=100_000)
        server.trouble = ""
        assert played(server, ["<action>7</action>"])[0]["reward"] == 1
        server.wait_until_nobody_is_connected()


def test_a_server_that_is_gone_is_named() -> None:
    with serving(GuessServer()) as server:
        environment = OpenEnv(OpenEnvConfig(url=server.url))
    with pytest.raises(InfrastructureError, match="no session: ClientConnectorError"):
        asyncio.run(environment.run(Task("", {"seed": 47}), FakeModel("7")))
    with pytest.raises(ConfigError, match=r"has no schema of actions .*start the OpenEnv server"):
        OpenEnv(OpenEnvConfig(url=server.url))


def test_no_more_sessions_are_open_than_allowed() -> None:
    async def play(environment: OpenEnv) -> list[Any]:
        episodes = (environment.run(task, FakeModel(answers)) for task in environment.tasks("train")[:12])
        return await asyncio.gather(*episodes)

    answers = [f"<action>{number}</action>" for number in range(10)]
    with serving(GuessServer(most=3)) as server:
        found = asyncio.run(play(OpenEnv(OpenEnvConfig(url=server.url, sessions=3))))
        assert all(rewards["done"] for rewards in found)
        assert server.sessions == 12
        assert server.peak <= 3
        with pytest.raises(InfrastructureError, match=r"CAPACITY_REACHED: all sessions are taken"):
            asyncio.run(play(OpenEnv(OpenEnvConfig(url=server.url, sessions=12))))


class Slow(FakeModel):
    async def reply(self, *asked: Any, **settings: Any) -> Reply:
        await asyncio.sleep(6.5)
        return await super().reply(*asked, **settings)


def test_waiting_for_a_session_counts_against_no_deadline(server: GuessServer) -> None:
    environment = OpenEnv(OpenEnvConfig(url=server.url, sessions=1))

    async def play(model: FakeModel, seconds: float) -> float:
        async with Gate().time_limit(seconds):
            return (await environment.run(Task("", {"seed": 47}), model))["reward"]

    async def both() -> list[float]:
        models = ((Slow("<action>7</action>"), 60.0), (FakeModel("<action>7</action>"), 6.0))
        return await asyncio.gather(*(play(*one) for one in models))

    assert asyncio.run(both()) == [1.0, 1.0]


def test_a_token_is_sent_with_every_request_and_never_shown(
    server: GuessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="token_variable: OPENENV_TOKEN is not set"):
        played(server, [], token_variable="OPENENV_TOKEN")
    monkeypatch.setenv("OPENENV_TOKEN", "secret")
    server.headers.clear()
    played(server, ["<action>7</action>"], token_variable="OPENENV_TOKEN")
    assert server.headers == ["Bearer secret"] * 2
    assert "secret" not in repr(OpenEnv(OpenEnvConfig(url=server.url, token_variable="OPENENV_TOKEN"))._server)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://there", "file:///etc/passwd", "http://", "http://a?b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"wanted the address of a server, e.g. http"):
        OpenEnvConfig(url=url)


def test_text_of_the_server_is_cut_and_breaks_no_chat_template() -> None:
    with serving(GuessServer()) as server:
        environment = OpenEnv(OpenEnvConfig(url=server.url, observation_characters=20))
        long = environment._shown({"text": "<|im_end|>" + "y" * 100})
        assert long == "< |im_end|>\n[90 characters left out]\nyyyyyyyyyy"
        assert environment._shown({"a": 1, "b": [2]}) == '{"a": 1, "b": [2]}'
