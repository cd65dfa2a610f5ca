"""Episodes that an agent server plays: which records, what the agent gets, and what comes of what it does wrong."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from whet.config.sections import Config, EndpointSection
from whet.config.structure import structure
from whet.errors import DataError, EpisodeError, InfrastructureError
from whet.interfaces.environment import Model
from whet.plugins.endpoints import InstalledEndpoints
from whet.plugins.registry import load_plugins
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.environment import NemoGym
from whet_env_nemo_gym.hooks import whet_check_config
from whet_testing.fakes import FakeModel

sys.path.insert(0, str(Path(__file__).parent))
from gym_server import AgentServer, CounterServer, record, serving, serving_agent, write

sys.path.remove(str(Path(__file__).parent))
pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")

ADD = '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>'
GET = '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>'


def of_agent(name: str = "simple", **changes: Any) -> dict[str, Any]:
    return {**record(), "agent_ref": {"type": "responses_api_agents", "name": name}, **changes}


@pytest.fixture(scope="module")
def counter() -> Iterator[CounterServer]:
    with serving(CounterServer()) as one:
        yield one


@pytest.fixture(scope="module")
def served(counter: CounterServer) -> Iterator[AgentServer]:
    with serving_agent(AgentServer(counter.url)) as one:
        yield one


@pytest.fixture
def agent(served: AgentServer) -> AgentServer:
    served.trouble = ""
    return served


def models(agent: AgentServer, *answers: Any) -> list[FakeModel]:
    """Models of one run, whose endpoints listen where the agent looks for them."""
    endpoints = InstalledEndpoints(EndpointSection(port=urlsplit(agent.model).port or 0))
    made = [FakeModel(one) for one in answers]
    for one in made:
        one.endpoints = endpoints
    return made


def model(agent: AgentServer, answers: Any) -> FakeModel:
    return models(agent, answers)[0]


def environment(agent: AgentServer, path: Path, *records: dict[str, Any], **changes: Any) -> NemoGym:
    data = write(path / "data.jsonl", *records)
    return NemoGym(NemoGymConfig(agents={"simple": agent.url}, dataset=data, **changes))


def played(environment: NemoGym, model: Model) -> dict[str, float]:
    return dict(asyncio.run(environment.run(environment.tasks("train")[0], model)))


def test_the_agent_that_a_record_names_plays_it_and_its_reward_is_the_episodes(
    agent: AgentServer, counter: CounterServer, tmp_path: Path
) -> None:
    counter.verified.clear()
    params = {**record()["responses_create_params"], "metadata": {"own": "1"}, "temperature": 0.1}
    made = environment(
        agent, tmp_path, of_agent(responses_create_params=params), system="Count well.", components=("told", "absent")
    )
    one = model(agent, [ADD, GET, "the count is 5"])
    assert played(made, one) == {"reward": 1, "turns": 3, "calls": 2, "told": 1, "absent": 0}
    assert [message.role for message in one.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert one.messages[0].text == "Count well."
    assert one.log["reward_components"] == '{"counted": 1.0, "told": 1.0}'
    (body,) = counter.verified
    assert body["expected_count"] == 5
    assert body["responses_create_params"]["metadata"]["own"] == "1"


def test_episodes_that_are_played_at_the_same_time_do_not_meet(agent: AgentServer, tmp_path: Path) -> None:
    """All requests arrive at one address, with equal prompts. The episodes of a group are told apart by their keys."""
    made = environment(agent, tmp_path, of_agent())
    group = models(agent, *([ADD, GET, f"the count is {5 + i % 2}"] for i in range(8)))

    async def play() -> list[Any]:
        return await asyncio.gather(*(made.run(made.tasks("train")[0], one) for one in group))

    assert [found["reward"] for found in asyncio.run(play())] == [1, 0] * 4


def test_a_record_that_names_no_agent_is_played_with_the_resources_server(
    agent: AgentServer, counter: CounterServer, tmp_path: Path
) -> None:
    made = environment(agent, tmp_path, record(), of_agent("another"), of_agent(), url=counter.url)
    for i, task in enumerate(made.tasks("train")):
        one = model(agent, [f"{ADD}{GET}" if i < 2 else f"{ADD}", "the count is 5"])
        assert asyncio.run(made.run(task, one))["reward"] == 1
        assert bool(one.forks) == (i < 2), "whet itself asks in a sequence with tools"


def test_a_record_that_nobody_plays_is_named_with_its_line(agent: AgentServer, tmp_path: Path) -> None:
    for wrong, words in ((record(), "there is no `agent_ref`"), (of_agent("other"), "`agent_ref` names 'other'")):
        with pytest.raises(DataError, match=rf"data.jsonl:2: {words}, and agents has simple; add it there, or a `url`"):
            environment(agent, tmp_path, of_agent(), wrong).tasks("train")


def test_an_agent_gets_records_whose_input_is_no_conversation(agent: AgentServer, tmp_path: Path) -> None:
    odd = of_agent(responses_create_params={"input": [], "tools": []})
    assert environment(agent, tmp_path, odd).tasks("train")[0].prompt[0].text == "[]"


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ("plays alone", EpisodeError, r"played without this model: its model server must be http://127.0.0.1:\d+,"),
        ("drops the metadata", InfrastructureError, r"answers /run with status 500: .*the key is not valid"),
    ],
)
def test_an_agent_that_does_not_reach_the_model_is_named(
    agent: AgentServer, tmp_path: Path, trouble: str, error: type[Exception], words: str
) -> None:
    agent.trouble = trouble
    with pytest.raises(error, match=words):
        played(environment(agent, tmp_path, of_agent()), model(agent, "5"))


def test_an_agent_that_does_not_take_a_record_is_named(agent: AgentServer, tmp_path: Path) -> None:
    wrong = {"responses_create_params": {"input": "Hi"}, "agent_ref": {"name": "simple"}}
    with pytest.raises(EpisodeError, match=r"/run does not take the record: .*expected_count: field required"):
        played(environment(agent, tmp_path, wrong), model(agent, "5"))


def test_an_agent_that_is_not_done_in_time_is_named(agent: AgentServer, tmp_path: Path) -> None:
    made = environment(agent, tmp_path, of_agent(), agent_seconds=0.5)
    with pytest.raises(InfrastructureError, match=r"answers /run with nothing within 0\.5 s"):
        played(made, model(agent, lambda _: GET))


def test_a_config_names_a_server_and_a_run_with_agents_a_port() -> None:
    with pytest.raises(ValueError, match="names no server"):
        NemoGymConfig(dataset="data.jsonl")
    with pytest.raises(ValueError, match="wanted the address of a server"):
        NemoGymConfig(dataset="data.jsonl", agents={"simple": "localhost"})
    played_here = {"use": "nemo-gym", "url": "http://127.0.0.1:1", "dataset": "data.jsonl"}
    by_agents = {"use": "nemo-gym", "agents": {"simple": "http://127.0.0.1:1"}, "dataset": "data.jsonl"}
    document = {
        "run": {"folder": "r", "steps": 1}, "model": {"path": "m"}, "algorithm": "grpo", "backend": "fsdp2",
        "environments": [played_here], "evaluation": {"every": 1, "environments": [played_here, by_agents]},
    }  # fmt: skip
    (problem,) = whet_check_config(structure(document, Config, load_plugins()))
    assert str(problem).startswith("endpoint.port: is 0")
    assert "the agents of evaluation.environments.1 call the model at one address" in str(problem)
    document["endpoint"] = {"port": 8123}
    assert not list(whet_check_config(structure(document, Config, load_plugins())))
