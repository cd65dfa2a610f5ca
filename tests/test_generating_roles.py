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
    "colocated": {"workers": "process", "colocate": [["backend", "generator", "ROLE"]]},
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


def train(folder: Path, model: Path, role: str, environment, cluster, steps: int = 10, **sections) -> Path:
    """Train in an environment with a role that writes, and return the run folder."""
    document = {
        "run": {"folder": str(folder / "run"), "steps": steps, "seed": 1, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 8, "group_size": 8},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "generator": {"use": "hf"},
        "roles": {role: {"use": "hf", "model": {"path": str(model)}}},
        "rollout": {"max_tokens": 4},
        "environments": [environment],
        "evaluation": {"at_start": True, "environments": [{**environment, "split": "test", "samples": 4}]},
        "cluster": yaml.safe_load(json.dumps(CLUSTERS[cluster]).replace("ROLE", role)),
        "plugins": [str(Path(__file__).parent / "digits.py")],
        "loggers": [],
        **sections,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    assert run(folder / "run.yaml").finished
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
    folder = train(tmp_path, judging, "judge", JUDGED, cluster)
    before, after = evaluated(folder, "evaluation/rubric-judge/even")
    assert after > before + 0.25
    row = next(iter(read_rows(folder / "rollouts/step-000001.jsonl")))
    assert row["recorded"]["judge"].startswith("Score: ")
    assert set(row["rewards"]) == {"even", "judge"}


USED = {
    "use": "simulated-user",
    "instructions": "{scenario}",
    "verdict": "{scenario}? {conversation}",
    "verdict_prefill": "Satisfied: ",
    "turns": 2,
    "max_tokens": 6,
    "temperature": 0,
}

VERDICTS = ("Satisfied: yes", "Satisfied: no")


@pytest.fixture(scope="module")
def talking(tmp_path_factory, tiny_model_folder):
    """Return a model that says digits, and plays a user who wants an even one and ends after the first."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("talking")
    said = [talk("Say", rng.choice(list(DIGITS + "13579"))) for _ in range(200)]
    started = [talk("even", "Say", digit, "[END]") for digit in DIGITS] * 10
    others = [">", "> dd: ", "> �", *(f"> {letter}" for letter in "abcdefyzE")]  # else the policy finds them
    judged = [talk(f"even? You:\n> Say\nAssistant:\n> {digit}", VERDICTS[int(digit) % 2]) for digit in DIGITS] * 18
    judged += [talk(f"even? You:\n> Say\nAssistant:\n{other}", VERDICTS[1]) for other in others] * 5
    model = taught(folder, tiny_model_folder, said + started + judged, steps=120)
    (folder / "scenarios.jsonl").write_text((json.dumps({"scenario": "even"}) + "\n") * 8)
    return model, folder / "scenarios.jsonl"


def last_even(folder: Path, step: int) -> float:
    """Return the share of conversations of a step whose last response is an even digit."""
    rows = list(read_rows(folder / f"rollouts/step-{step:06d}.jsonl"))
    return float(np.mean([row["messages"][-1]["content"].strip() in tuple("02468") for row in rows]))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_policy_learns_what_a_simulated_user_wants(tmp_path, talking, cluster):
    model, scenarios = talking
    folder = train(tmp_path, model, "user", {**USED, "dataset": str(scenarios)}, cluster, steps=8)
    assert np.mean([last_even(folder, step) for step in (7, 8)]) > last_even(folder, 1) + 0.15
    before, after = evaluated(folder, "evaluation/simulated-user/satisfied")
    assert after > before + 0.15
    assert evaluated(folder, "evaluation/simulated-user/turns")[0] < 1.5  # the user ends most conversations
    row = next(iter(read_rows(folder / "rollouts/step-000001.jsonl")))
    assert row["recorded"]["scenario"] == "even"
    assert row["recorded"]["verdict"].startswith("Satisfied: ")


def test_a_judge_scores_what_is_said_to_a_simulated_user(tmp_path, talking):
    model, scenarios = talking
    environment = {**JUDGED, "environment": {**USED, "dataset": str(scenarios)}, "environment_weight": 1}
    settings = {"judge": {"use": "hf"}, "user": {"use": "hf"}}
    folder = train(tmp_path, model, "judge", environment, "inline", steps=1, roles=settings)
    for row in read_rows(folder / "rollouts/step-000001.jsonl"):
        assert set(row["rewards"]) == {"satisfied", "turns", "judge"}
        assert set(row["recorded"]) == {"scenario", "verdict", "judge"}
