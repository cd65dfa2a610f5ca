"""Runs whose episodes are played by verifiers, unmodified, from nothing but YAML."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from whet.run.compose import run

for needed in ("whet_env_verifiers", "whet_endpoint", "whet_fsdp2", "whet_grpo", "whet_hf"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

BESIDE = Path(__file__).parents[2] / "plugins" / "environments" / "verifiers" / "tests"
spec = importlib.util.spec_from_file_location("verifiers_found", BESIDE / "verifiers_found.py")
assert spec
assert spec.loader
found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)
PYTHON = found.interpreter()
TEMPLATE = Path(__file__).parents[1] / "tools.jinja"
pytestmark = [pytest.mark.skipif(PYTHON is None, reason=found.WHY_NOT), pytest.mark.slow]


@pytest.mark.parametrize(
    ("taskset", "settings", "part"),
    [("vf_sums", {"test_tasks": 8}, "letters"), ("vf_shelf", {"tasks": 40, "test_tasks": 8}, "counted")],
)
def test_a_taskset_is_trained_on_and_evaluated(tmp_path, tiny_model_folder, taskset, settings, part):
    """Two steps of two groups of two, and an evaluation of two tasks."""
    environment = {
        "use": "verifiers", "taskset": taskset, "python": PYTHON, "folders": [str(found.TASKSETS)], "max_turns": 2,
        **settings,
    }  # fmt: skip
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(tiny_model_folder), "chat_template": str(TEMPLATE)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
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
    assert all(part in episode["rewards"] and "reward" in episode["rewards"] for episode in episodes)
    assert f"evaluation/verifiers/{part}" in rows[-1]
