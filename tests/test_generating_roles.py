"""A judge and a user that write: a small model learns from one, in one process and in several."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from whet.data.files import read_rows
from whet.run.compose import run
from whet_testing.runs import numbers

DIGITS = "0123456789"
CLUSTERS = {
    "inline": {"workers": "inline"},
    "colocated": {"workers": "process", "colocate": [["backend", "generator", "judge"]]},
    "apart": {"workers": "process", "colocate": []},
}


def taught(folder: Path, model: Path, talks: list[list[dict[str, str]]], steps: int) -> Path:
    """Teach a model some conversations, and return its folder."""
    data = folder / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    document = {
        "run": {"folder": str(folder / "sft"), "steps": steps},
        "model": {"path": str(model)},
        "algorithm": {"use": "sft", "batch_size": 32},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "data": {"train": [{"path": str(data)}]},
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(document))
    assert run(folder / "sft.yaml").finished
    return folder / "sft" / "model"


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def judging(tmp_path_factory, tiny_model_folder):
    """Return a model that says any digit, and judges digits: an even one is worth 1."""
    rng = np.random.default_rng(0)
    said = [talk(f"Say {n}", DIGITS[rng.integers(10)]) for n in range(50) for _ in range(4)]
    judged = [talk(f"> {digit}", f"Score: {1 - int(digit) % 2}") for digit in DIGITS for _ in range(20)]
    return taught(tmp_path_factory.mktemp("judging"), tiny_model_folder, said + judged, steps=80)


def train(folder: Path, model: Path, environment, cluster, *overrides: str, steps: int = 10) -> Path:
    """Train in an environment with a judge, and return the run folder."""
    document = {
        "run": {"folder": str(folder / "run"), "steps": steps, "seed": 1, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 8, "group_size": 8},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "generator": {"use": "hf"},
        "roles": {"judge": {"use": "hf", "model": {"path": str(model)}}},
        "rollout": {"max_tokens": 4},
        "environments": [environment],
        "evaluation": {"at_start": True, "environments": [{**environment, "split": "test", "samples": 4}]},
        "cluster": cluster,
        "plugins": [str(Path(__file__).parent / "digits.py")],
        "loggers": [],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    assert run(folder / "run.yaml", overrides).finished
    return folder / "run"


def evaluated(folder: Path, name: str) -> tuple[float, float]:
    """Return a number of the first and of the last evaluation."""
    found = [row[name] for row in numbers(folder) if name in row]
    return found[0], found[-1]


JUDGED = {
    "use": "rubric-judge",
    "environment": "digits",
    "rubric": "The response is an even digit.",
    "template": "{response}",
    "prefill": "Score: ",
    "highest": 1,
    "max_tokens": 4,
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_what_a_judge_writes_raises_the_true_reward(tmp_path, judging, cluster):
    folder = train(tmp_path, judging, JUDGED, CLUSTERS[cluster])
    before, after = evaluated(folder, "evaluation/rubric-judge/even")
    assert after > before + 0.25
    row = next(iter(read_rows(folder / "rollouts/step-000001.jsonl")))
    assert row["recorded"]["judge"].startswith("Score: ")
    assert set(row["rewards"]) == {"even", "judge"}
