"""Runs whose episodes are played by verifiers, unmodified, from nothing but YAML."""

import importlib.util
import json
import subprocess
import sys
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


def two_steps(folder, model, environment):
    """Train two steps of two groups of two, and evaluate two tasks. Return the metrics and the episodes."""
    document = {
        "run": {"folder": str(folder / "run"), "steps": 2, "export": False},
        "model": {"path": str(model), "chat_template": str(TEMPLATE)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-4}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "environments": [environment],
        "evaluation": {"every": 2, "environments": [{**environment, "limit": 2}]},
        "cluster": {"workers": "inline"},
    }
    (folder / "it.yaml").write_text(yaml.safe_dump(document))
    assert run(folder / "it.yaml").finished
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = sorted((folder / "run" / "rollouts").glob("step-*.jsonl"))
    episodes = [json.loads(line) for step in steps for line in step.read_text().splitlines()]
    assert len(episodes) == 8
    return rows, episodes


def python_of(named):
    """Return the interpreter that a config's `python` names."""
    folder = Path(named or sys.prefix)
    return str(folder / "bin" / "python") if folder.is_dir() else str(folder)


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
    rows, episodes = two_steps(tmp_path, tiny_model_folder, environment)
    assert all(part in episode["rewards"] and "reward" in episode["rewards"] for episode in episodes)
    assert f"evaluation/verifiers/{part}" in rows[-1]


WORDS = "bad bed bid bud cab cub dab dub fab fed gab gag jab lab lad lid mad mud nab rib rob rub sad sob tab tub"


@pytest.mark.parametrize("game", ["Hangman-v0", "WordSearch-v0"])
def test_games_of_textarena_are_trained_on_and_evaluated_as_verifiers_publishes_them(
    tmp_path, tiny_models, monkeypatch, game
):
    """The taskset `textarena`, which comes with verifiers. Its games draw words from nltk's list, put there by hand."""
    if subprocess.run([python_of(PYTHON), "-c", "import nltk, textarena"], capture_output=True).returncode:
        pytest.skip("the interpreter with verifiers lacks textarena")
    corpus = tmp_path / "nltk" / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (corpus / name).write_text("".join(f"{word}\n" for word in WORDS.split()))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    environment = {
        "use": "verifiers", "taskset": "textarena", "options": {"game": game}, "python": PYTHON, "tasks": 24,
        "test_tasks": 8, "max_turns": 3,
    }  # fmt: skip
    rows, episodes = two_steps(tmp_path, tiny_models("qwen3", max_positions=4096), environment)
    assert all("game_reward" in episode["rewards"] for episode in episodes)
    assert all("[GAME]" in episode["messages"][1]["content"] for episode in episodes)
    assert "evaluation/verifiers/game_reward" in rows[-1]
