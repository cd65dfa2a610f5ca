"""NeMo Gym's own resources server and agent server, unmodified: episodes, and a run from nothing but YAML."""

import asyncio
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.config.sections import EndpointSection
from whet.plugins.endpoints import InstalledEndpoints
from whet.run.compose import run
from whet_env_nemo_gym.config import NemoGymConfig
from whet_env_nemo_gym.environment import NemoGym
from whet_testing.fakes import FakeModel

for needed in ("whet_endpoint", "whet_fsdp2", "whet_grpo", "whet_hf"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

BESIDE = Path(__file__).parents[2] / "plugins" / "environments" / "nemo_gym" / "tests"
spec = importlib.util.spec_from_file_location("nemo_gym_servers_of_tests", BESIDE / "gym_server.py")
assert spec
assert spec.loader
gym = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gym)
PYTHON = os.environ.get("WHET_NEMO_GYM_PYTHON", "")
TEMPLATE = Path(__file__).parents[1] / "tools.jinja"
WHY_NOT = "NeMo Gym needs Python 3.12: make an environment with nemo-gym 0.4, and name it by WHET_NEMO_GYM_PYTHON"
pytestmark = [pytest.mark.skipif(not PYTHON, reason=WHY_NOT), pytest.mark.slow]
ADD = '<tool_call>{"name": "increment_counter", "arguments": {"count": 2}}</tool_call>'
GET = '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>'
WRONG = '<tool_call>{"name": "increment_counter", "arguments": {"count": "two"}}</tool_call>'


@pytest.fixture(scope="module")
def servers() -> Any:
    """The addresses of both servers, and the port at which they look for the model."""
    port = gym.free_port()
    command = [str(Path(PYTHON) / "bin" / "python"), str(Path(__file__).with_name("nemo_gym_servers.py")), str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, f"the servers did not start: exit status {process.wait(60)}"
    yield {**json.loads(line), "port": port}
    process.stdin.close()
    assert process.wait(60) == 0


def record(agent: bool, start: int) -> dict[str, Any]:
    named = {"agent_ref": {"type": "responses_api_agents", "name": "simple_agent"}}
    return {**gym.record(2, start), **(named if agent else {})}


def keys(servers: dict[str, Any], data: str) -> dict[str, Any]:
    return {"url": servers["counter"], "agents": {"simple_agent": servers["simple_agent"]}, "dataset": data}


@pytest.mark.parametrize("agent", [False, True], ids=["played by whet", "played by their agent"])
@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [([ADD, GET, "It is 5"], 1, 3), ([f"{ADD}{GET}", "It is 5"], 1, 2), ([GET, "It is 3"], 0, 2), ([WRONG, "?"], 0, 2)],
)
def test_their_reward_is_the_same_whoever_plays(servers, tmp_path, agent, answers, reward, turns):
    environment = NemoGym(NemoGymConfig(**keys(servers, gym.write(tmp_path / "a.jsonl", record(agent, 3)))))
    model = FakeModel(answers)
    model.endpoints = InstalledEndpoints(EndpointSection(port=servers["port"]))
    found = asyncio.run(environment.run(environment.tasks("train")[0], model))
    calls = sum(answer.count("<tool_call>") for answer in answers)
    assert found == {"reward": reward, "turns": turns, "calls": calls}
    talk = model if agent else model.forks[0]
    assert [message.role for message in talk.messages][-1] == "assistant"
    if answers[0] == WRONG:
        assert "valid integer" in talk.messages[2].text, "the server's own words"


def test_a_run_trains_and_evaluates_with_their_agent_and_without(servers, tmp_path, tiny_model_folder):
    """Two steps of two groups of two, and an evaluation."""
    records = [record(bool(i % 2), i) for i in range(8)]
    environment = {
        "use": "nemo-gym",
        **keys(servers, gym.write(tmp_path / "data.jsonl", *records)),
        "turns": 4,
        "agent_seconds": 60,
    }
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(tiny_model_folder), "chat_template": str(TEMPLATE)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 16, "temperature": 1.0},
        "endpoint": {"port": servers["port"]},
        "environments": [environment],
        "evaluation": {"every": 2, "environments": [{**environment, "limit": 2}]},
        "cluster": {"workers": "inline"},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = sorted((tmp_path / "run" / "rollouts").glob("step-*.jsonl"))
    episodes = [json.loads(line) for step in steps for line in step.read_text().splitlines()]
    assert len(episodes) == 8
    assert all(episode["rewards"].keys() >= {"reward", "turns", "calls"} for episode in episodes)
    assert "evaluation/nemo-gym/reward" in rows[-1]
    assert not any(row.get("episodes/failed") or row.get("groups/dropped") for row in rows)
