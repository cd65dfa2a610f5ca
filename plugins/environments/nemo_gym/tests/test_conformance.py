import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whet.data.messages import Tools
from whet.data.records import Reply, Task
from whet.errors import ConfigError, DataError, EpisodeError, InfrastructureError
from whet.rollout.gate import Gate
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.environment import NemoGym
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.environment import EnvironmentContract
from whet_testing.fakes import FakeModel

sys.path.insert(0, str(Path(__file__).parent))
from gym_server import TOOLS, TROUBLES, CounterServer, record, serving, write

sys.path.remove(str(Path(__file__).parent))

ADD = '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>'
GET = '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[CounterServer]:
    with serving(CounterServer()) as one:
        yield one


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = [record(2, start) for start in range(20)]
    return write(tmp_path_factory.mktemp("gym") / "data.jsonl", *records)


class TestPlugin(ComponentContract):
    hooks = "whet_env_nemo_gym.hooks"
    documents = {"nemo-gym": {"url": "http://127.0.0.1:8000", "dataset": "made-up.jsonl"}}


class TestNemoGym(EnvironmentContract):
    splits = ("train",)
    states_answers = False

    @pytest.fixture(autouse=True)
    def _server(self, server: CounterServer, data: str) -> None:
        self.server, self.data = server, data

    def make(self) -> NemoGym:
        return NemoGym(NemoGymConfig(url=self.server.url, dataset={"train": self.data}))

    def gold(self, task: Task) -> list[str]:
        return [ADD, f"It is {task.data['record']['expected_count']}"]


def played(server: CounterServer, data: str, answers: Any, **changes: Any) -> tuple[dict[str, float], list[str], Any]:
    environment = NemoGym(NemoGymConfig(url=server.url, dataset=data, **changes))
    model = FakeModel(answers)
    rewards = dict(asyncio.run(environment.run(environment.tasks("train")[3], model)))
    talk = model.forks[0]
    return rewards, [message.text for message in talk.messages if message.role == "tool"], model


def test_an_episode_is_a_session_with_tools_that_ends_with_a_verified_response(
    server: CounterServer, data: str
) -> None:
    server.verified.clear()
    answers = [f"{ADD}{ADD}", GET, "<think>It was 7, so</think>\n\nthe count is 5"]
    rewards, told, model = played(server, data, answers, components=("counted", "told", "absent"))
    assert told == ['{"success": true}', '{"success": true}', '{"count": 7}']
    assert rewards == {"reward": 0, "turns": 3, "calls": 3, "counted": 0, "told": 1, "absent": 0}
    assert model.log["reward_components"] == '{"counted": 0.0, "told": 1.0}'
    (body,) = server.verified
    assert {key: body[key] for key in ("initial_count", "expected_count")} == {"initial_count": 3, "expected_count": 5}
    output = body["response"]["output"]
    assert [item["type"] for item in output] == [
        "function_call", "function_call", "function_call_output", "function_call_output", "function_call",
        "function_call_output", "reasoning", "message",
    ]  # fmt: skip
    assert [output[2]["call_id"], output[3]["call_id"]] == [output[0]["call_id"], output[1]["call_id"]]
    assert output[6]["summary"][0]["text"] == "<think>It was 7, so"
    assert output[7]["content"][0]["text"] == "the count is 5"
    assert body["response"]["tools"] == TOOLS


def test_an_episode_ends_after_its_turns_or_with_the_context_and_what_there_is_is_verified(
    server: CounterServer, data: str
) -> None:
    server.verified.clear()
    rewards, _, _ = played(server, data, lambda _: GET, turns=2)
    assert (rewards["turns"], rewards["calls"], rewards["reward"]) == (2, 2, 0)
    environment, model = NemoGym(NemoGymConfig(url=server.url, dataset=data)), FakeModel(lambda _: GET, room=1)
    assert asyncio.run(environment.run(environment.tasks("train")[3], model))["turns"] == 1
    assert len(server.verified) == 2


def test_what_a_model_calls_wrongly_is_told_to_it(server: CounterServer, data: str) -> None:
    calls = [
        '<tool_call>{"name": "verify", "arguments": {"reward": 1}}</tool_call>',
        '<tool_call>{"name": "../admin", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "increment_counter", "arguments": {"count": "two"}}</tool_call>',
    ]
    rewards, told, _ = played(server, data, [*calls, "done"])
    assert told == [
        '{"error": "there is no such tool; there are get_counter_value, increment_counter"}',
        '{"error": "there is no such tool; there are get_counter_value, increment_counter"}',
        '{"detail": "count: an integer is required"}',
    ]
    assert rewards["calls"] == 3


@pytest.mark.parametrize("route", ["seed_session", "increment_counter", "verify"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_a_server_does_wrong_is_named_and_no_reward(data: str, route: str, trouble: str) -> None:
    if route != "verify" and trouble not in ("hangs", "closes", "sends too much"):
        pytest.skip("the answers of other routes may be anything")
    seconds = 0.5 if trouble == "hangs" else 30
    with serving(CounterServer()) as server:
        server.trouble, server.route = trouble, route
        named = f"NeMo Gym server {server.url} answers /{route} with "
        with pytest.raises(InfrastructureError, match=named):
            played(server, data, [ADD, "5"], seconds=seconds, reply_bytes=100_000)


def test_a_tool_that_fails_is_told_to_the_model(data: str) -> None:
    with serving(CounterServer()) as server:
        server.trouble, server.route = "fails", "increment_counter"
        assert played(server, data, [ADD, "5"])[1] == ["Internal Server Error"]


def test_a_record_that_the_server_does_not_take_is_named(server: CounterServer, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", *[{"responses_create_params": {"input": "Hi", "tools": TOOLS}}] * 4)
    with pytest.raises(EpisodeError, match=r"seed_session does not take the record.*initial_count: field required"):
        played(server, data, "5")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"input": "Hi"}, "wanted a record of NeMo Gym"),
        ({"responses_create_params": {"input": []}}, "does not end with a message of the user"),
        ({"responses_create_params": {"input": [{"type": "image"}]}}, "wanted messages, calls and their results"),
        ({"responses_create_params": {"input": "Hi", "tools": [{"type": "web_search"}]}}, "wanted a function"),
        (
            {"responses_create_params": {"input": "Hi", "tools": [{"type": "function", "name": "a/../b"}]}},
            "wanted letters, digits and underscores",
        ),
        ({"responses_create_params": {"input": [{"role": "user", "content": [{"type": "x"}]}]}}, "wanted text"),
        ({"responses_create_params": {"input": 5}}, "`input` is 5, wanted text or a list"),
        ({"responses_create_params": {"input": None}}, "`input` is None, wanted text or a list"),
        ({"responses_create_params": {"input": "Hi", "tools": 5}}, "`tools` is 5, wanted a list"),
        ({"responses_create_params": {"input": [{"role": ["user"], "content": "x"}]}}, "wanted messages, calls"),
        (
            {"responses_create_params": {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}},
            "without 'call_id'",
        ),
        (
            {"responses_create_params": {"input": [{"type": "function_call_output", "call_id": "1"}]}},
            "without 'output'",
        ),
    ],
)
def test_a_record_that_is_none_is_named_with_its_line(
    server: CounterServer, tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    config = NemoGymConfig(url=server.url, dataset=write(tmp_path / "data.jsonl", record(), wrong))
    with pytest.raises(DataError, match=rf"data.jsonl:2: [^\n]*{words}"):
        NemoGym(config).tasks("train")


def test_parts_of_an_earlier_conversation_are_taken_over(server: CounterServer, tmp_path: Path) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Count."},
        {"type": "function_call", "call_id": "c1", "name": "get_counter_value", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": '{"count": 3}'},
    ]
    config = NemoGymConfig(
        url=server.url, dataset=write(tmp_path / "data.jsonl", {"responses_create_params": {"input": items}})
    )
    prompt = NemoGym(config).tasks("train")[0].prompt
    assert [message.role for message in prompt] == ["system", "user", "assistant", "tool"]
    assert (prompt[2].calls[0].name, prompt[3].answers) == ("get_counter_value", "c1")


def test_no_more_episodes_talk_to_the_server_than_allowed(data: str) -> None:
    async def play(environment: NemoGym) -> list[Any]:
        return await asyncio.gather(*(environment.run(task, FakeModel([ADD, "5"])) for task in environment.tasks("x")))

    with serving(CounterServer()) as server:
        found = asyncio.run(play(NemoGym(NemoGymConfig(url=server.url, dataset=data, sessions=3))))
        assert len(found) == 20
        assert server.peak <= 3


class Slow(FakeModel):
    async def reply(self, *asked: Any, **settings: Any) -> Reply:
        await asyncio.sleep(6.5)
        return await super().reply(*asked, **settings)

    def with_tools(self, tools: Tools) -> FakeModel:
        self.tools = tools
        return self


def test_waiting_for_a_session_counts_against_no_deadline(server: CounterServer, data: str) -> None:
    environment = NemoGym(NemoGymConfig(url=server.url, dataset=data, sessions=1))
    task = environment.tasks("train")[3]

    async def play(model: FakeModel, seconds: float) -> float:
        async with Gate().time_limit(seconds):
            return (await environment.run(task, model))["turns"]

    async def both() -> list[float]:
        return await asyncio.gather(play(Slow("5"), 60.0), play(FakeModel("5"), 6.0))

    assert asyncio.run(both()) == [1.0, 1.0]


def test_a_token_that_is_not_set_is_named(server: CounterServer, data: str) -> None:
    with pytest.raises(ConfigError, match="token_variable: GYM_TOKEN is not set"):
        NemoGym(NemoGymConfig(url=server.url, dataset=data, token_variable="GYM_TOKEN"))
