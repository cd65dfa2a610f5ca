"""Runs whose environments are played by servers of others: OpenEnv and NeMo Gym, from nothing but YAML."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from whet.run.compose import run

for needed in ("whet_env_openenv", "whet_env_nemo_gym", "whet_fsdp2", "whet_grpo", "whet_hf"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

ENVIRONMENTS = Path(__file__).parents[1] / "plugins" / "environments"


def module(path: Path) -> ModuleType:
    """Return the module of a file beside a plugin's tests."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def trained(
    tmp_path: Path, model: Path, environment: dict[str, object], **more: object
) -> tuple[list[dict[str, float]], list[dict]]:
    """Train for two steps and evaluate. Returns the rows of metrics, and the last step's episodes."""
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "environments": [environment],
        "evaluation": {"every": 2, "environments": [{**environment, "limit": 2}]},
        "cluster": {"workers": "inline"},
        **more,
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
    assert run(tmp_path / "it.yaml").finished
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = max((tmp_path / "run" / "rollouts").glob("step-*.jsonl"))
    return rows, [json.loads(line) for line in last.read_text().splitlines()]


def test_an_openenv_server_is_trained_on_and_evaluated(tmp_path, tiny_model_folder):
    openenv = module(ENVIRONMENTS / "openenv" / "tests" / "serving.py")
    with openenv.serving(openenv.GuessServer()) as server:
        environment = {"use": "openenv", "url": server.url, "sessions": 2, "turns": 2}
        rows, episodes = trained(tmp_path, tiny_model_folder, environment)
        server.wait_until_nobody_is_connected()
    assert rows[-1]["evaluation/openenv/invalid"] == 2  # an untrained model acts by chance, if ever
    assert [episode["rewards"]["invalid"] for episode in episodes] == [2] * 4
    assert server.sessions >= 2 * 4 + 2
    assert server.peak <= 2


def test_episodes_that_a_server_drops_are_played_again_and_counted(tmp_path, tiny_model_folder):
    openenv = module(ENVIRONMENTS / "openenv" / "tests" / "serving.py")
    with openenv.serving(openenv.GuessServer(trouble="closes", times=3, on="reset")) as server:
        rows, episodes = trained(
            tmp_path, tiny_model_folder, {"use": "openenv", "url": server.url, "turns": 1}, evaluation={}
        )
    assert len(episodes) == 4
    assert server.times == 0
    assert sum(row.get("episodes/retried", 0) for row in rows) >= 1


def test_a_resources_server_of_nemo_gym_is_trained_on_and_evaluated(tmp_path, tiny_model_folder):
    gym = module(ENVIRONMENTS / "nemo_gym" / "tests" / "gym_server.py")
    data = gym.write(tmp_path / "data.jsonl", *(gym.record(2, start) for start in range(8)))
    with gym.serving(gym.CounterServer()) as server:
        environment = {"use": "nemo-gym", "url": server.url, "dataset": data, "components": ["told"]}
        rows, episodes = trained(tmp_path, tiny_model_folder, environment)
    assert rows[-1]["evaluation/nemo-gym/reward"] == 0
    assert all(episode["rewards"] == {"reward": 0, "turns": 1, "calls": 0, "told": 0} for episode in episodes)
    assert len(server.verified) >= 2 * 4 + 2
    assert not server.open
