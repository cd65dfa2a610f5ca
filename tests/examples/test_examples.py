"""The examples train from their YAML, with nothing changed anywhere else."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = (
    "run.steps=2 run.export=false algorithm.prompts_per_step=2 algorithm.group_size=4 "
    "evaluation.environments.0.limit=8 cluster.workers=inline"
)


def test_the_package_has_at_most_a_hundred_lines():
    package = EXAMPLES / "whet-env-reverse"
    files = [package / "pyproject.toml", *package.glob("src/**/*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 100


@pytest.mark.slow
def test_an_environment_package_trains_once_it_is_installed(shell, tiny_model_folder, tmp_path):
    shell(f"pip install -e {EXAMPLES / 'whet-env-reverse'}", tmp_path)
    check_trains(shell, EXAMPLES / "whet-env-reverse" / "reverse.yaml", tiny_model_folder, tmp_path, "reverse")


@pytest.mark.slow
def test_a_single_file_environment_trains(shell, tiny_model_folder, tmp_path):
    recipe = EXAMPLES / "single_file_environment.yaml"
    check_trains(shell, recipe, tiny_model_folder, tmp_path, "letters")


def check_trains(shell, recipe: Path, model: Path, folder: Path, environment: str) -> None:
    shell(f"whet run {recipe} model.path={model} run.folder=run {SMALL}", folder)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(f"evaluation/{environment}/reward" in row for row in (rows[0], rows[-1]))
    rollouts = (folder / "run" / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    assert [json.loads(line)["environment"] for line in rollouts] == [environment] * 8
